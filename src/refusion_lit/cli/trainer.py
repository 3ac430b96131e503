"""``fit``, ``validate``, ``test`` and ``predict``: help and checks first, then the imports that take seconds."""

from __future__ import annotations

from importlib import import_module

from refusion_lit.cli.check import check_arguments
from refusion_lit.cli.help import print_help, wants_help
from refusion_lit.cli.trainer_options import read_description

_SUMMARIES = {
    "fit": "Train a model.",
    "validate": "Compute the validation loss of a checkpoint.",
    "test": "Decode a test set with every decoder of the config and print them side by side.",
    "predict": "Write predictions as JSON lines.",
}


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
        print_help(args, description, command, _SUMMARIES[command], hidden=("trainer",))
        return 0
    check_arguments(args, description, command)
    return import_module("refusion_lit.cli.lightning").run([command, *args])
