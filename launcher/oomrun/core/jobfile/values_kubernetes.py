"""The scalar kinds of the section ``kubernetes``: names, images, amounts, taints.

What ends up in a manifest is checked here to the letter, so that a job file can put
nothing into it but values.
"""

import re
from collections.abc import Callable

from oomrun.core import kubernetes_syntax as syntax
from oomrun.core import units
from oomrun.core.jobfile.kinds import Text
from oomrun.core.kubernetes_spec import JOB_FOLDER, OWN_KEYS, WORKSPACE, Toleration

_IMAGE_WORDS = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_IMAGE_PATTERN = (
    rf"^(?:{_IMAGE_WORDS}(?::[0-9]{{1,5}})?/)?{_IMAGE_WORDS}(?:/{_IMAGE_WORDS})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$"
)
_AMOUNT_PATTERN = (
    r"^[0-9]{1,12}(?:\.[0-9]{1,6})? ?(?:[kKmMgGtT][iI]?[bB]|[KMGT]i|[bB])$"
)
_CPU_PATTERN = r"^(?:[0-9]{1,4}(?:\.[0-9]{1,3})?|[0-9]{1,7}m)$"
_GPU_PATTERN = r"^nvidia\.com/(?:gpu|gpu\.shared|mig-[1-9]g\.[0-9]{1,3}gb(?:\.me)?)$"
_MOUNT_PATTERN = r"^(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)+$"
_FILE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*$"
_TOLERATION_PATTERN = (
    r"^[A-Za-z0-9][A-Za-z0-9._/-]*(?:=[A-Za-z0-9._-]*)?"
    r"(?::(?:NoSchedule|PreferNoSchedule|NoExecute))?$"
)
# What a container needs as it is, or what oomrun mounts itself.
_TAKEN_PATHS = (
    WORKSPACE, JOB_FOLDER, "/tmp", "/dev", "/proc", "/sys", "/etc", "/usr", "/bin",
    "/lib", "/lib64", "/sbin", "/run", "/var/run",
)  # fmt: skip

_DAY_S = 86_400


def _shaped(pattern: str, longest: int, hint: str = "") -> Callable[[str], str]:
    def check(text: str) -> str:
        if len(text) > longest:
            raise ValueError(f"at most {longest} characters")
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(hint)
        return text

    return check


def _amount(text: str) -> int:
    # Kubernetes writes 32Gi where oomrun writes 32GiB; both can only mean one thing.
    if re.fullmatch(r"[0-9.]+ ?[KMGT]i", text, re.ASCII):
        text += "B"
    size = units.parse_bytes(text)
    if size < 1:
        raise ValueError("more than nothing")
    return size


def _millicores(text: str) -> int:
    if not re.fullmatch(_CPU_PATTERN, text, re.ASCII):
        raise ValueError("")
    milli = int(text[:-1]) if text.endswith("m") else round(float(text) * 1000)
    if milli < 1:
        raise ValueError("more than nothing")
    return milli


def _mount_path(text: str) -> str:
    _shaped(_MOUNT_PATTERN, 1024, "an absolute path of letters and digits")(text)
    for taken in _TAKEN_PATHS:
        if text == taken or text.startswith(taken + "/"):
            raise ValueError(f"{taken} is taken")
    return text


def _label_key(text: str) -> str:
    if not syntax.is_qualified_name(text):
        raise ValueError("letters, digits, '-', '_' and '.'; at most 63 characters")
    if text.startswith(("app.kubernetes.io/", "batch.kubernetes.io/", "kueue.x-k8s")):
        raise ValueError("oomrun or Kubernetes sets it")
    return text


def _plain_key(text: str) -> str:
    if not syntax.is_qualified_name(text):
        raise ValueError("letters, digits, '-', '_' and '.'; at most 63 characters")
    return text


def _free_key(text: str) -> str:
    if text in OWN_KEYS:
        raise ValueError("oomrun sets it")
    return _plain_key(text)


def _toleration(text: str) -> Toleration:
    if not re.fullmatch(_TOLERATION_PATTERN, text, re.ASCII):
        raise ValueError("the effects are NoSchedule, PreferNoSchedule and NoExecute")
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not syntax.is_qualified_name(key) or not syntax.is_label_value(value):
        raise ValueError("")
    return Toleration(key=key, value=value if equals else None, effect=effect or None)


def seconds(low: int, high: int) -> Text:
    """A time in whole seconds within a range."""

    def check(text: str) -> int:
        if text.isdecimal():
            raise ValueError(f"add a unit: {text}s or {text}min")
        found = units.parse_duration(text)
        if not low <= found <= high:
            least, most = units.format_duration(low), units.format_duration(high)
            raise ValueError(f"from {least} to {most}")
        return round(found)

    return Text(
        words="a time such as 10min", check=check, pattern=units.DURATION_PATTERN
    )


IMAGE = Text(
    words="an image such as registry/team/train:1",
    check=_shaped(_IMAGE_PATTERN, 512, "lower-case letters before the tag"),
    pattern=_IMAGE_PATTERN,
    longest=512,
)
NAMESPACE = Text(
    words="a namespace such as team-a",
    check=_shaped(syntax.DNS_LABEL_PATTERN, syntax.LONGEST_LABEL),
    pattern=syntax.DNS_LABEL_PATTERN,
)
OBJECT = Text(
    words="a name such as team-a",
    check=_shaped(syntax.DNS_SUBDOMAIN_PATTERN, syntax.LONGEST_SUBDOMAIN),
    pattern=syntax.DNS_SUBDOMAIN_PATTERN,
)
QUEUE = Text(
    words="the name of a queue such as training",
    # It becomes the value of a label.
    check=_shaped(syntax.DNS_LABEL_PATTERN, syntax.LONGEST_LABEL),
    pattern=syntax.DNS_LABEL_PATTERN,
)
AMOUNT = Text(
    words="a size such as 32GiB or 32Gi", check=_amount, pattern=_AMOUNT_PATTERN
)
CPU = Text(
    words="a number of cores such as 4 or 500m",
    check=_millicores,
    pattern=_CPU_PATTERN,
    any_number=True,
)
GPU_RESOURCE = Text(
    words="nvidia.com/gpu or a MIG device such as nvidia.com/mig-1g.10gb",
    check=_shaped(_GPU_PATTERN, 63),
    pattern=_GPU_PATTERN,
)
MOUNT_PATH = Text(
    words="an absolute path such as /data", check=_mount_path, pattern=_MOUNT_PATTERN
)
FILE = Text(
    words="a file below the folder of the job file such as data/words.txt",
    check=_shaped(_FILE_PATTERN, 512, "letters, digits, '.', '-', '_' and '/'"),
    pattern=_FILE_PATTERN,
)
LABEL_KEY = Text(
    words="the key of a label", check=_label_key, pattern=syntax.QUALIFIED_NAME_PATTERN
)
PLAIN_KEY = Text(
    words="a key such as topology.kubernetes.io/zone",
    check=_plain_key,
    pattern=syntax.QUALIFIED_NAME_PATTERN,
)
LABEL_VALUE = Text(
    words="the value of a label such as team-a",
    check=_shaped(syntax.LABEL_VALUE_PATTERN, syntax.LONGEST_LABEL),
    pattern=syntax.LABEL_VALUE_PATTERN,
)
FREE_KEY = Text(
    words="a key such as release",
    check=_free_key,
    pattern=syntax.QUALIFIED_NAME_PATTERN,
)
ANNOTATION = Text(words="a text", longest=65_536)
TOLERATION = Text(
    words="a taint such as dedicated=training:NoSchedule",
    check=_toleration,
    pattern=_TOLERATION_PATTERN,
)
GRACE = seconds(30, _DAY_S)
TTL = seconds(0, 365 * _DAY_S)
DEADLINE = seconds(1, 365 * _DAY_S)
