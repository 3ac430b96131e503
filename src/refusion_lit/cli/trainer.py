"""``fit``, ``validate``, ``test`` and ``predict``: help and checks first, then the imports that take seconds."""

from __future__ import annotations

from importlib import import_module

from refusion_lit.cli.check import check_arguments
from refusion_lit.cli.description import Description, Option
from refusion_lit.cli.help import print_help, wants_help
from refusion_lit.cli.run_directory import with_resume
from refusion_lit.cli.trainer_options import read_description

_SUMMARIES = {
    "fit": "Train a model.",
    "validate": "Compute the validation loss of a checkpoint.",
    "test": "Decode a test set with every decoder of the config and print them side by side.",
    "predict": "Write predictions as JSON lines.",
}
_RESUME = Option(
    kinds=("str",),
    help="Continue an interrupted run: a run's directory (its config is then used), a version of RUN_NAME, or without "
    "a value the newest run of RUN_NAME, if there is one.",
)


def run(command: str, args: list[str]) -> int:
    """Run a command of the Trainer.

    Args:
        command: Its name.
        args: Its arguments.

    Raises:
        ValueError: If an argument or a config is wrong.
    """
    description = read_description(command)
    if wants_help(args):
        options = dict(description.options) | ({} if command == "validate" else {"resume": _RESUME})
        shown = Description(options, description.components)
        print_help(args, shown, command, _SUMMARIES[command], hidden=("trainer",))
        return 0
    given, resume = _split_resume(args)
    if resume is not None:
        given = with_resume(command, given, resume)
    check_arguments(given, description, command)
    return import_module("refusion_lit.cli.running").run([command, *given])


def _split_resume(args: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without ``--resume [RUN]``, and RUN: empty if left out, ``None`` without the option."""
    for place, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name != "--resume":
            continue
        rest = args[place + 1 :]
        if arg == name and rest and not rest[0].startswith("-"):
            value, rest = rest[0], rest[1:]
        return [*args[:place], *rest], value
    return args, None
