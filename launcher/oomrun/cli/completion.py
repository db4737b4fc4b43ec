"""``oomrun completion SHELL``: a script by which a shell completes our command line.

Covers: writing one from the parsers, so that it knows every option. Does not cover:
installing it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

__all__ = ["add_parser", "script"]

_SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: Any) -> None:
    """Adds ``completion`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        help="print a completion script",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print a completion script.",
        epilog="bash:  oomrun completion bash > "
        "~/.local/share/bash-completion/completions/oomrun\n"
        'zsh:   oomrun completion zsh > "${fpath[1]}/_oomrun"\n'
        "fish:  oomrun completion fish > ~/.config/fish/completions/oomrun.fish",
    )
    parser.add_argument(
        "shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh, fish"
    )
    parser.set_defaults(handler=completion)


def completion(args: argparse.Namespace) -> int:
    """Prints the script."""
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for ``shell``, one of bash, zsh and fish."""
    from oomrun.cli import COMMANDS, build_parser

    parser = build_parser(list(COMMANDS))
    options = {name: _options(parser, name) for name in COMMANDS}
    summaries = {name: command.summary for name, command in COMMANDS.items()}
    match shell:
        case "bash":
            return _bash(options)
        case "zsh":
            return _zsh(options, summaries)
        case _:
            return _fish(options, summaries)


def _options(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """The command's long options, and the words its argument may be."""
    found: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices[name]._actions:
                found += [text for text in inner.option_strings if text[:2] == "--"]
                if not inner.option_strings and inner.choices:
                    found += map(str, inner.choices)
    return found


def _bash(options: Mapping[str, list[str]]) -> str:
    cases = "\n".join(
        f'        {name}) words="{" ".join(words)}" ;;'
        for name, words in options.items()
    )
    return f"""\
# bash completion for oomrun, made by `oomrun completion bash`
_oomrun() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="{" ".join(options["run"])}" ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join(options)} --help --version"
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _oomrun oomrun
"""


def _zsh(options: Mapping[str, list[str]], summaries: Mapping[str, str]) -> str:
    described = "\n".join(
        f"        '{name}:{_quoted(text)}'" for name, text in summaries.items()
    )
    cases = "\n".join(
        f"        {name}) compadd -- {' '.join(words)} ;;"
        for name, words in options.items()
    )
    return f"""\
#compdef oomrun
# zsh completion for oomrun, made by `oomrun completion zsh`
_oomrun() {{
    local -a commands
    commands=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        _files
        return
    fi
    case "${{words[2]}}" in
{cases}
        *) compadd -- {" ".join(options["run"])} ;;
    esac
    _files
}}
compdef _oomrun oomrun
"""


def _fish(options: Mapping[str, list[str]], summaries: Mapping[str, str]) -> str:
    lines = ["# fish completion for oomrun, made by `oomrun completion fish`"]
    for name, text in summaries.items():
        lines.append(
            f"complete -c oomrun -n __fish_use_subcommand -a {name} "
            f"-d '{_quoted(text)}'"
        )
    for name, words in options.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for word in words:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c oomrun {seen} {what}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """``text`` within single quotes of any of the shells."""
    return text.replace("'", "’")
