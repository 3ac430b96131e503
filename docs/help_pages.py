"""Renders the help of every command into files of the package, which ``--help`` prints without slow imports.

usage: python docs/help_pages.py [DIRECTORY]

``tests/cli/test_help.py`` fails if the files are not what this program renders. It runs on its own: Python keeps
``int | float`` and ``float | int`` as one object, so the order of a type's parts depends on what is imported first.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

PAGES = Path(__file__).parents[1] / "src" / "refusion_lit" / "cli" / "help"
TRAINER = "Customize every aspect of training via flags:"
"""Lightning's title of the options of the Trainer, which ``--help=all`` shows."""
_CKPT_PATH = {
    "fit": "checkpoint of a training to continue; last: the newest one of RUN_NAME (and RUN_VERSION), if there is one",
    "others": "checkpoint, Hugging Face directory or hub id of the model; last: the newest one of RUN_NAME",
}
_SUMMARIES = {
    "fit": "Train a model.",
    "validate": "Compute the validation loss of a checkpoint.",
    "test": "Decode a test set with every decoder of the config and print them side by side.",
    "predict": "Write predictions as JSON lines.",
}
_RESUME = (
    " --resume [RUN] continues an interrupted run: a run's directory (its config is then used), a version of RUN_NAME, "
    "or without RUN the newest run of RUN_NAME, if there is one."
)


def pages() -> dict[str, str]:
    """Return the pages by name: one for each command, ``shared`` by those of the Trainer, and ``trainer``."""
    os.environ["COLUMNS"] = "120"
    from refusion_lit.cli import OWN
    from refusion_lit.cli.lightning import parse_only

    found = {}
    for command, place in OWN.items():
        module, _, function = place.partition(".")
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            getattr(import_module(f"refusion_lit.cli.{module}"), function)(["--help"])
        found[command] = shown.getvalue()
    groups = {
        command: re.split(r"\n\n(?=\S)", _described(command, parser).format_help().rstrip())
        for command, parser in parse_only()._subcommand_parsers.items()
    }
    shared = [group for group in groups["fit"] if all(group in others for others in groups.values())]
    for command, own in groups.items():
        found[command] = _page(group for group in own if group not in shared)
    found["trainer"] = _page(group for group in shared if group.startswith(TRAINER))
    hint = "Options of the Trainer: add --help=all"
    found["shared"] = _page([*(group for group in shared if not group.startswith(TRAINER)), hint])
    return found


def _described(command: str, parser: ArgumentParser) -> ArgumentParser:
    """Return the parser of a command of the Trainer with help that says what Lightning's options do here."""
    parser.description = _SUMMARIES[command] + ("" if command == "validate" else _RESUME)
    parser.usage = f"refusion-lit {command} --config FILE [--OPTION VALUE ...]"
    for action in parser._actions:
        if action.dest == "ckpt_path":
            action.help = _CKPT_PATH["fit" if command == "fit" else "others"]
        elif action.dest == "weights_only":
            action.help = "without effect: checkpoints are always loaded as data only"
    return parser


def _page(groups: Iterable[str]) -> str:
    return "".join(f"{group}\n\n" for group in groups)


def main(directory: str = str(PAGES)) -> None:
    """Write the pages."""
    for name, page in pages().items():
        (Path(directory) / f"{name}.txt").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
