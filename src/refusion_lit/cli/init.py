"""``refusion-lit init DIR``: copy the example configs out of the package."""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path


def configs_directory() -> Path:
    """Return where the example configs are: inside an installed package, or beside ``src`` in a checkout.

    Raises:
        ValueError: If neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "configs", package.parent.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise ValueError("init: the example configs are missing from this installation; reinstall refusion-lit.")


def run(args: list[str]) -> int:
    """Copy the configs.

    Raises:
        ValueError: If the directory holds configs already.
    """
    parser = ArgumentParser(prog="refusion-lit init", description="Copy the example configs into DIR/configs.")
    parser.add_argument("directory", metavar="DIR", help="where to put them; made if missing")
    target = Path(parser.parse_args(args).directory) / "configs"
    if target.exists():
        raise ValueError(f"DIR: expected a place without configs, got {target}, which exists. Choose another one.")
    shutil.copytree(configs_directory(), target)
    sys.stdout.write(f"{len(list(target.rglob('*.yaml')))} configs in {target}\n")
    return 0
