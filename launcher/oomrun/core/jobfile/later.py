"""What the job file can say but this version cannot do: refused by name, never ignored.

One table, so that bringing a feature means deleting its line here.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from oomrun.core.jobfile.kinds import Json
from oomrun.core.jobfile.reading import Reading

VERSION = "0.1"  # core stands alone; a test compares it with oomrun.__version__

_REMOTE = ("gs://", "s3://", "hdfs://")


class Later(NamedTuple):
    """A feature of a later version.

    ``found`` takes the key's value and gives (path suffix, name) for each use;
    without it, the key itself is the feature. ``refused`` is the same as JSON Schema.
    """

    path: str
    about: str  # for the reference: what is not in this version
    instead: str
    refused: dict[str, Json]
    found: Callable[[object], Iterator[tuple[str, str]]] | None = None


def _remote(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value.lower().startswith(_REMOTE):
        yield "", f"a checkpoint folder at {value.partition('://')[0].lower()}://"


LATER = (
    Later(
        path="checkpoint.dir",
        about="Remote folders (`gs://`, `s3://`, `hdfs://`).",
        instead="use a local folder, or one that is mounted",
        refused={"pattern": "^(?:[gG][sS]|[sS]3|[hH][dD][fF][sS])://"},
        found=_remote,
    ),
)


def refuse(reading: Reading) -> None:
    """Report each use of a feature that this version does not have."""
    for later in LATER:
        if later.found is None:
            key = reading.keys.get(later.path)
            if key is not None:
                message = f"{later.path} is not in oomrun {VERSION} yet"
                reading.problems.append(key.problem(later.path, message, later.instead))
        elif later.path in reading.values:
            for suffix, name in later.found(reading.values[later.path]):
                message = f"{name} is not in oomrun {VERSION} yet"
                reading.report(later.path + suffix, message, later.instead)
