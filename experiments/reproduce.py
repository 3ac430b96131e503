"""Run an experiment from its folder and compare what comes out with the committed result.

usage: python experiments/reproduce.py EXPERIMENT OUTPUT [--update]

EXPERIMENT holds ``reproduce.yaml``: ``commands`` (run from the repository's root; ``{output}`` is replaced), ``result``
(the committed file of EXPERIMENT), ``fresh`` (its counterpart below OUTPUT, by default of the same name) and
``compare`` (see compare.py). ``--update`` commits to what came out: it replaces ``result``, and the files of ``also``
(from OUTPUT), instead of comparing.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from compare import main as compare


def main(folder: Path, output: Path, *, update: bool = False) -> int:
    """Return 0 if the result came out again, or replaces the committed one."""
    recipe = yaml.safe_load((folder / "reproduce.yaml").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    for line in recipe["commands"]:
        command = [part.format(output=output) for part in shlex.split(line)]
        sys.stdout.write(f"$ {shlex.join(command)}\n")
        sys.stdout.flush()
        subprocess.run(command, check=True)
    committed, fresh = folder / recipe["result"], output / recipe.get("fresh", recipe["result"])
    if update:
        shutil.copyfile(fresh, committed)
        for name in recipe.get("also", []):
            shutil.copyfile(output / name, folder / name)
        return 0
    return compare(str(committed), str(fresh), str(folder / "reproduce.yaml"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), update="--update" in sys.argv[3:]))
