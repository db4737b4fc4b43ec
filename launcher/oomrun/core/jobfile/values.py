"""The scalar kinds of the job file: names, paths, sizes, shares, intervals, addresses.

Each checks one text, makes its typed value, and states the same as a pattern for the
JSON Schema. A check raises ValueError with a hint (or none) for the user.
"""

import re

from oomrun.core import remote, units
from oomrun.core.host_names import HOST_PATTERN
from oomrun.core.jobfile.kinds import Text
from oomrun.core.spec import Bytes, EverySeconds, EverySteps, Listen, Share

NAME_PATTERN = r"^[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?$"
_MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*$"
_UUID_PATTERN = r"^(?:GPU|MIG)-[0-9A-Za-z/-]{4,}$"
_VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
_LISTEN_PATTERN = r"^(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
_STEPS_PATTERN = r"^[1-9][0-9]{0,11} ?steps?$"
_URL_PATTERN = r"^https?://[^ @]+$"
_USER_PATTERN = r"^[^:]+$"  # a colon ends the name in what is sent
_SHARE_TO_LEAVE_PATTERN = r"^[0-9]{1,2}(?:\.[0-9]+)? ?%$"

# The job's own memory and device keys set these; two masters would contradict.
_TAKEN_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "use devices",
    "CUDA_DEVICE_ORDER": "use devices",
    "TF_FORCE_GPU_ALLOW_GROWTH": "use memory.mode",
}


def _matching(pattern: str, text: str) -> str:
    if not re.fullmatch(pattern, text, re.ASCII):
        raise ValueError("")
    return text


def slug(text: str) -> str:
    """The nearest valid job name, or "" if nothing of the text can stay."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-")


def _name(text: str) -> str:
    if re.fullmatch(NAME_PATTERN, text, re.ASCII):
        return text
    nearest = slug(text)
    raise ValueError(f"did you mean {nearest}?" if nearest else "")


def _path(text: str) -> str:
    if not text.strip():
        raise ValueError("")
    if any(ord(letter) < 32 for letter in text):
        raise ValueError("it has a line break or a control character in it")
    return text


def _folder(text: str) -> str:
    if remote.is_remote(_path(text)):
        remote.check(text)
    return text


def _module(text: str) -> str:
    if re.fullmatch(_MODULE_PATTERN, text, re.ASCII):
        return text
    raise ValueError("use script for a file" if text.endswith(".py") else "")


def _variable(text: str) -> str:
    _matching(_VARIABLE_PATTERN, text)
    if text in _TAKEN_VARIABLES:
        raise ValueError(f"oomrun sets {text} itself: {_TAKEN_VARIABLES[text]}")
    if text.startswith("OOMRUN_"):
        raise ValueError("names that start with OOMRUN_ are oomrun's own")
    return text


def _size(text: str) -> Bytes:
    return Bytes(units.parse_bytes(text))


def _positive_size(text: str) -> Bytes:
    size = _size(text)
    if size.count == 0:
        raise ValueError("more than nothing")
    return size


def _share_to_use(text: str) -> Share:
    share = Share(units.parse_fraction(text))
    if share.fraction == 0:
        raise ValueError("more than 0%")
    return share


def _share_to_leave(text: str) -> Share:
    share = Share(units.parse_fraction(text))
    if share.fraction >= 1:
        raise ValueError("less than 100%")
    return share


def _steps(text: str) -> EverySteps:
    if not re.fullmatch(_STEPS_PATTERN, text, re.ASCII):
        raise ValueError("")
    return EverySteps(int(text[: text.index("s")]))


def _interval(text: str) -> EverySeconds:
    if text.isdecimal():
        raise ValueError(f"add a unit: {text} steps or {text}min")
    seconds = units.parse_duration(text)
    if not 1 <= seconds <= 31 * 86_400:
        raise ValueError("from 1s to 31d")
    return EverySeconds(seconds)


def _listen(text: str) -> Listen:
    if text.isdecimal() or text.startswith(":"):
        raise ValueError(f"name the address too: 127.0.0.1:{text.lstrip(':')}")
    _matching(_LISTEN_PATTERN, text)
    host, _, port = text.rpartition(":")
    if int(port) > 65535:
        raise ValueError("ports end at 65535")
    return Listen(host=host.strip("[]"), port=int(port))


def _url(text: str) -> str:
    if "@" in text:
        raise ValueError("without user and password, which would lie in the run's copy")
    return _matching(_URL_PATTERN, text)


NAME = Text(
    words="lower-case letters, digits and '-', at most 63 characters",
    check=_name,
    pattern=NAME_PATTERN,
    longest=63,
)
PATH = Text(words="a path", check=_path)
FOLDER = Text(
    words="a folder, or a URL such as gs://bucket/folder",
    check=_folder,
    pattern=remote.PATTERN,
    expands=True,
)
MODULE = Text(
    words="a module such as package.train", check=_module, pattern=_MODULE_PATTERN
)
WORD = Text(words="text or a number", expands=True, any_number=True, longest=65_536)
VARIABLE = Text(
    words="the name of an environment variable",
    check=_variable,
    pattern=_VARIABLE_PATTERN,
)
UUID = Text(
    words="a UUID such as GPU-8f6d",
    check=lambda text: _matching(_UUID_PATTERN, text),
    pattern=_UUID_PATTERN,
)
SIZE = Text(words="a size such as 600MiB", check=_size, pattern=units.SIZE_PATTERN)
LIMIT = Text(
    words="a size such as 20GiB", check=_positive_size, pattern=units.SIZE_PATTERN
)
SHARE_TO_USE = Text(
    words="a share such as 90%", check=_share_to_use, pattern=units.SHARE_PATTERN
)
SHARE_TO_LEAVE = Text(
    words="a share below 100% such as 8%",
    check=_share_to_leave,
    pattern=_SHARE_TO_LEAVE_PATTERN,
)
STEPS = Text(
    words="a number of steps such as 500 steps", check=_steps, pattern=_STEPS_PATTERN
)
INTERVAL = Text(
    words="a time such as 10min", check=_interval, pattern=units.DURATION_PATTERN
)
LISTEN = Text(
    words="an address such as 127.0.0.1:9464", check=_listen, pattern=_LISTEN_PATTERN
)
SECRET_VARIABLE = Text(
    words="the name of an environment variable",
    check=lambda text: _matching(_VARIABLE_PATTERN, text),
    pattern=_VARIABLE_PATTERN,
)
HOST = Text(
    words="the name of a host",
    check=lambda text: _matching(HOST_PATTERN, text),
    pattern=HOST_PATTERN,
    longest=255,
)
USER = Text(
    words="a user name without a colon",
    check=lambda text: _matching(_USER_PATTERN, text),
    pattern=_USER_PATTERN,
)
URL = Text(
    words="a URL such as http://gateway:9091",
    check=_url,
    pattern=_URL_PATTERN,
)
