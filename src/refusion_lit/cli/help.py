"""The help of a command, from its description."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from refusion_lit.cli.description import Description, Option, Options, describe

_METAVARS = {"int": "N", "float": "X", "bool": "true|false", "str": "TEXT", "list": "LIST", "component": "CLASS"}
_INDENT = 8


def wants_help(args: Sequence[str]) -> bool:
    """Return whether arguments ask for the help of the command, or of a component (``--decoder.help ReFusion``)."""
    return any(arg in ("-h", "--help", "--help=all") or arg.partition("=")[0].endswith(".help") for arg in args)


def print_help(
    args: Sequence[str], description: Description, command: str, summary: str, hidden: Sequence[str] = ()
) -> None:
    """Print what the arguments ask for.

    Args:
        args: The command's arguments.
        description: Its options.
        command: Its name.
        summary: What it does.
        hidden: Groups of options that only ``--help=all`` shows.

    Raises:
        ValueError: If help is asked for a component that does not exist.
    """
    for place, arg in enumerate(args):
        name, _, value = arg.removeprefix("--").partition("=")
        if name.endswith(".help"):
            value = value or next(iter(args[place + 1 :]), "")
            sys.stdout.write(_component_page(name.removesuffix(".help"), value, description))
            return
    shown = () if "--help=all" in args else hidden
    sys.stdout.write(_command_page(description.options, command, summary, shown))


def print_help_of(parser: Any, args: Sequence[str]) -> None:  # noqa: ANN401 - a parser of jsonargparse
    """Print the help of a command, or of a component, from its parser."""
    print_help(args, describe(parser), str(parser.prog).rpartition(" ")[2], parser.description or "")


def _command_page(options: Options, command: str, summary: str, hidden: Sequence[str]) -> str:
    positional = [name for name, option in options.items() if option.positional]
    named = {name: option for name, option in options.items() if option.required and not option.positional}
    required = [f"--{name} {_metavar(option)}" for name, option in named.items()]
    usage = " ".join(["usage: refusion-lit", command, *(required if "config" not in options else ["--config FILE"])])
    lines = [f"{usage} [--OPTION VALUE ...]{''.join(f' {name.upper()}' for name in positional)}", "", summary]
    group = None
    for name, option in sorted(options.items(), key=lambda item: _group(item[0]) != ""):
        if option.kinds == ("group",) or _group(name) in hidden or (not option.help and option.default is None):
            continue
        if _group(name) != group:
            group = _group(name)
            lines += ["", f"{group or 'options'}:"]
        lines += _entry(name, option)
    if hidden:
        lines += ["", f"Options of {', '.join(hidden)}: refusion-lit {command} --help=all"]
    if any(option.base for option in options.values()):
        lines += ["", "Options of a class: --NAME.help CLASS"]
    return "\n".join(lines) + "\n"


def _component_page(name: str, cls: str, description: Description) -> str:
    option = description.options.get(name)
    if option is None or option.base is None:
        raise ValueError(f"{name}.help: expected an option that takes a class, got {name!r}; leave out .help.")
    known = description.components[option.base]
    if cls.rpartition(".")[2] not in known:
        return f"--{name} takes: {', '.join(known)}. Their options: --{name}.help CLASS\n"
    lines = [f"{cls}:"]
    for inner, each in (known[cls.rpartition(".")[2]] or {}).items():
        lines += _entry(f"{name}.{inner}" if "component" in option.kinds else f"{name}.NAME.{inner}", each)
    return "\n".join(lines) + "\n"


def _group(name: str) -> str:
    return name.partition(".")[0] if "." in name else ""


def _metavar(option: Option) -> str:
    kinds = [_METAVARS.get(kind, kind.upper()) for kind in option.kinds if kind != "null"]
    return "|".join([*map(str, option.choices), *kinds])


def _entry(name: str, option: Option) -> list[str]:
    head = name.upper() if option.positional else f"--{name}" if option.flag else f"--{name} {_metavar(option)}"
    notes = "" if option.flag else "required" if option.required else f"default: {_shown(option.default)}"
    text = " ".join(filter(None, (option.help.replace("``", "`"), f"({notes})" if notes else "")))
    width = min(shutil.get_terminal_size().columns, 120)
    margin = " " * _INDENT
    return [f"  {head}", *([fill(text, width, initial_indent=margin, subsequent_indent=margin)] if text else [])]


def _shown(default: object) -> str:
    return default if isinstance(default, str) and default else json.dumps(default)
