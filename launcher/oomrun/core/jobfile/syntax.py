"""What to do about a YAML syntax error, from what the parser says and the line itself.

A table, because the parser's words ("did not find expected key") name what its grammar
missed and not what the writer did.
"""

_ADVICE = (
    (
        "mapping values are not allowed",
        "quote text with ': ' in it, or indent alike",
    ),
    ("did not find expected key", "indent the keys of one section alike"),
    ("expected <block end>", "indent the keys of one section alike"),
    ("expected ',' or ']'", "close the list with ]"),
    ("expected ',' or '}'", "close the mapping with }"),
    ("could not find expected ':'", "write key: value, with a space after the colon"),
    ("end of stream", "close the quote"),
    (
        "found undefined tag handle",
        "tags are not allowed; quote text with ! first",
    ),
    ("unknown escape", "write text with backslashes in 'single quotes'"),
    ("invalid character", "write text with backslashes in 'single quotes'"),
)


def syntax_advice(problem: str, source_line: str, column: int) -> str:
    """A hint for the user, or "" if there is nothing to say."""
    at = source_line[column - 1 : column]
    indent = source_line[: len(source_line) - len(source_line.lstrip())]
    if at == "\t" or "\t" in indent:
        return "indent with spaces, not with tabs"
    if "cannot start any token" in problem and at:
        return f"quote text that starts with {at}"
    return next((advice for text, advice in _ADVICE if text in problem), "")
