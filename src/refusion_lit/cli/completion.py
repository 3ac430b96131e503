"""``refusion-lit completion SHELL``: print a script with which the shell completes commands, options and values."""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS
from collections import defaultdict
from importlib import import_module
from typing import Literal

from jsonargparse import ArgumentParser

from refusion_lit.cli import COMMANDS
from refusion_lit.cli.parser import OneLineParser

_CLASS_PATH = re.compile(r"(?<![\w.])(?:[a-z_]\w*\.)+([A-Z]\w*)")


def build_parser() -> OneLineParser:
    """Return the parser of ``completion``."""
    text = "Print a script that completes commands, options and their values in a shell. Needs the package shtab."
    parser = OneLineParser(prog="refusion-lit completion", description=text)
    parser.add_argument("shell", type=Literal["bash", "zsh"], help="shell of the script")
    return parser


def run(args: list[str]) -> int:
    """Print the script. It contains all names, so that the shell completes without starting Python.

    Raises:
        ValueError: If the shell is unknown, or shtab is missing.
    """
    shell = build_parser().parse(args).shell
    try:
        import shtab  # noqa: F401 # pyright: ignore[reportMissingImports] - jsonargparse's, and optional
    except ImportError as error:
        raise ValueError("completion: expected the package shtab, got none; run pip install shtab.") from error
    script = _shorten_classes(_root_parser().get_completion_script(f"shtab-{shell}"))
    # Both shells complete file names where they know no values, because most of these options take paths.
    if shell == "bash":
        script = script.replace("complete -o bashdefault ", "complete -o bashdefault -o default ")
    else:
        script = re.sub(r'(^  ["{]-.*?\]:[^: ]+:)(?:\(null\))?"$', r'\1_files"', script, flags=re.MULTILINE)
    sys.stdout.write(f"{script}\n")
    return 0


def _root_parser() -> ArgumentParser:
    """Return a parser with all commands and all of their options."""
    from refusion_lit.cli.lightning import build_parsers

    parsers: dict[str, ArgumentParser] = {**build_parsers()}
    for parser in parsers.values():
        for action in parser._actions:
            if any(" " in name for name in action.option_strings):
                action.help = SUPPRESS  # jsonargparse's list of linked options is no option
        parser.add_argument("--resume", type=str, help="directory of an interrupted run")
    for name, place in COMMANDS.items():
        module = import_module(f"refusion_lit.cli.{place.partition('.')[0]}")
        builder = "build_gguf_parser" if name == "import-gguf" else "build_parser"
        parsers[name] = getattr(module, builder)()
    root = OneLineParser(prog="refusion-lit")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subcommands(required=False)
    for name, parser in parsers.items():
        commands.add_subcommand(name, parser, help=str(parser.description).partition(". ")[0])
    return root


def _shorten_classes(script: str) -> str:
    """Replace import paths by class names, which options accept as well.

    Import paths stay where several classes share a name. Our own classes always get their short names: an option
    accepts one base class alone, so that it cannot confuse an objective with a decoder.
    """
    paths = defaultdict(set)
    for match in _CLASS_PATH.finditer(script):
        paths[match[1]].add(match[0])

    def shorten(match: re.Match[str]) -> str:
        is_unique = len(paths[match[1]]) == 1 or match[0].startswith("refusion_lit.")
        return match[1] if is_unique else match[0]

    return _CLASS_PATH.sub(shorten, script)
