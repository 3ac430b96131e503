"""Write every generated table and plot of README, docs and experiments from the committed JSON.

usage: python -m docs.figures [--check]

``--check`` writes nothing; it lists what differs from the JSON and ends with 1 if anything does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.figures.pages import contents, outdated_plots
from docs.figures.registry import PLOTS, ROOT, draw


def outdated() -> Iterator[Path]:
    """Yield each file that is not what the JSON gives."""
    for path, content in contents():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            yield path
    yield from outdated_plots()


def main() -> int:
    """Write what is outdated, or list it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="list what differs from the JSON, and write nothing")
    args = parser.parse_args()
    paths = list(outdated())
    written = dict(contents())
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if args.check:
            sys.stdout.write(f"{name}: differs from the JSON; run `nox -s figures`\n")
        else:
            sys.stdout.write(f"{name}\n")
            if name in PLOTS:
                draw(PLOTS[name], path)
            else:
                path.write_text(written[path], encoding="utf-8")
    return 1 if args.check and paths else 0


if __name__ == "__main__":
    sys.exit(main())
