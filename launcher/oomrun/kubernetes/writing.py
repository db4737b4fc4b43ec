"""Objects as YAML that every reader reads alike.

Covers: quoting all text that YAML 1.1, YAML 1.2 and the Go libraries of kubectl may
take for something else. Does not cover: where it is written to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

__all__ = ["document", "documents"]

# PyYAML leaves `y`, `1e3` and `0o7` without quotes: it reads them as text itself, but
# kubectl's parser does not.
_plain = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*", re.ASCII)
_taken = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_text_block = re.compile(r"[\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]*", re.ASCII)


class _Writer(yaml.SafeDumper):
    """Writes no aliases, which not every reader takes, and quotes what it should."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style: str | None = '"'
    if _plain.fullmatch(text) and text.lower() not in _taken:
        style = None
    elif "\n" in text and _text_block.fullmatch(text):
        style = "|"
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Writer.add_representer(str, _text)


def document(manifest: dict[str, Any]) -> str:
    """One object."""
    return yaml.dump(
        manifest,
        Dumper=_Writer,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=10_000,  # folded lines are hard to compare
    )


def documents(manifests: Iterable[dict[str, Any]]) -> str:
    """Several objects in one stream."""
    return "---\n".join(document(manifest) for manifest in manifests)
