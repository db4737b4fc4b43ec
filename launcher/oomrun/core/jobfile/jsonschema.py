"""The job file as JSON Schema (draft 2020-12), for editors.

Printed from the table of keys. It knows types, ranges and known keys; it does not know
how keys go together, which ``validate`` does.
"""

from oomrun.core.jobfile.fields import JOB
from oomrun.core.jobfile.kinds import (
    Field,
    Json,
    Kind,
    ListOf,
    MapOf,
    Missing,
    OneOf,
    Section,
)
from oomrun.core.jobfile.nodes import join
from oomrun.core.jobfile.version import VERSION


def schema() -> dict[str, Json]:
    """The JSON Schema of a job file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"oomrun {VERSION} job file",
        **_kind(JOB, ""),
        # Which of them is a choice between keys, so no single key can say it.
        "oneOf": [{"required": [key]} for key in ("script", "module", "command")],
    }


def _field(field: Field, path: str) -> dict[str, Json]:
    result: dict[str, Json] = {"description": field.about.replace("`", "")}
    result.update(_kind(field.kind, path))
    if not isinstance(field.default, Missing):
        result["default"] = field.default
    if field.examples:
        result["examples"] = list(field.examples)
    return result


def _kind(kind: Kind, path: str) -> dict[str, Json]:
    match kind:
        case Section():
            return _section(kind, path)
        case MapOf():
            return {
                "type": "object",
                "propertyNames": kind.key.schema(),
                "additionalProperties": kind.value.schema(),
            }
        case ListOf():
            return {
                "type": "array",
                "items": _kind(kind.item, ""),
                "minItems": kind.shortest,
                "uniqueItems": kind.unique,
            }
        case OneOf():
            return {"anyOf": [_kind(option, path) for option in kind.options]}
        case _:
            return kind.schema()


def _section(section: Section, path: str) -> dict[str, Json]:
    result: dict[str, Json] = {
        "type": "object",
        "properties": {
            field.key: _field(field, join(path, field.key)) for field in section.fields
        },
        "additionalProperties": False,
    }
    required: list[Json] = [field.key for field in section.fields if field.required]
    if required:
        result["required"] = required
    return result
