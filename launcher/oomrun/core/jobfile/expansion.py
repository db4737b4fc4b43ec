"""``${VAR}`` and ``${VAR:-default}`` in the few values where they are expanded.

The environment comes in as a mapping: the core reads none.
"""

import re
from collections.abc import Callable, Mapping

_variable = re.compile(
    r"\$\$\{[^{}$]*\}?|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|([^{}]*)\}?)",
    re.ASCII,
)


class ExpansionError(ValueError):
    """A variable that cannot be filled in; ``hint`` says what would help."""

    def __init__(self, message: str, hint: str) -> None:
        self.hint = hint
        super().__init__(message)


def expand(
    text: str, environment: Mapping[str, str], quote: Callable[[str], str] = str
) -> str:
    """The text with its variables filled in; ``$${`` stands for ``${``.

    As in a shell, the default is taken when the variable is not set or empty.
    ``quote`` is applied to all that is filled in, where the rest has a meaning that
    what comes from outside must not have.

    Raises:
        ExpansionError: A variable is not set and has no default, or is misspelt.
    """

    def value_of(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if match.group(0).startswith("$${"):
            return quote(match.group(0)[1:])
        if name is None:
            raise ExpansionError(
                f"expected ${{NAME}} or ${{NAME:-default}}, got {match.group(0)}",
                "write $${ for a ${ that is meant as text",
            )
        value = environment.get(name, "")
        if default is not None:
            return quote(value or default)
        if name not in environment:
            raise ExpansionError(
                f"the environment variable {name} is not set",
                f"set it, or give a default: ${{{name}:-…}}",
            )
        return quote(value)

    return _variable.sub(value_of, text)
