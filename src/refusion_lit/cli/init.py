"""``refusion-lit init DIR``: copy the example configs out of the package."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from refusion_lit.utils.require import require

if TYPE_CHECKING:
    from refusion_lit.cli.parser import OneLineParser


def configs_directory() -> Path:
    """Return the folder of the example configs: inside an installed package, or beside ``src`` in a checkout.

    Raises:
        ValueError: If neither folder exists.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "configs", package.parent.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise ValueError("init: the example configs are missing from this installation; reinstall refusion-lit.")


def build_parser() -> OneLineParser:
    """Return the parser of ``init``, for its help and for completion."""
    from refusion_lit.cli.parser import OneLineParser

    parser = OneLineParser(prog="refusion-lit init", description="Copy the example configs into DIR/configs.")
    parser.add_argument(
        "directory", type=str, metavar="DIR", help="directory for the folder configs; created if missing"
    )
    return parser


def run(args: list[str]) -> int:
    """Copy the configs. Files that exist with the same content, as in a clone, stay.

    Raises:
        ValueError: If there is no directory, or a file in it differs from a config of the same name.
    """
    is_single = len(args) == 1 and (args[0] in ("-h", "--help") or not args[0].startswith("-"))
    require(is_single, "DIR", "one directory", " ".join(args), "write one, as in `refusion-lit init .`")
    # A directory needs no parser, so that init runs before the packages of the other commands are installed.
    directory = build_parser().parse(args).directory if args[0].startswith("-") else args[0]
    target = Path(directory) / "configs"
    require(not target.parent.is_file(), "DIR", "a directory", f"the file {target.parent}", "choose another place")
    source = configs_directory()
    configs = sorted(source.rglob("*.yaml"))
    for path in configs:
        copy = target / path.relative_to(source)
        is_free = not copy.exists() or copy.read_bytes() == path.read_bytes()
        require(is_free, "DIR", "a place without configs", f"{copy}, which was changed", "choose another place")
    if source.resolve() != target.resolve():
        shutil.copytree(source, target, dirs_exist_ok=True)
    sys.stdout.write(f"{len(configs)} configs in {target}\n")
    return 0
