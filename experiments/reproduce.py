"""Run an experiment again and compare with the committed result: reproduce.py FOLDER OUTPUT [--update true].

FOLDER holds ``reproduce.yaml``: ``commands`` (run from the repository's root; ``{output}`` is replaced), ``result``
(the committed file of FOLDER), ``fresh`` (its counterpart below OUTPUT, by default of the same name) and
``compare`` (see compare.py). ``--update true`` compares nothing: it replaces ``result``, and the files of ``also``,
by the files in OUTPUT.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from compare import main as compare
from jsonargparse import auto_cli


def main(folder: Path, output: Path, *, update: bool = False) -> int:
    """Run an experiment again and compare its result with the committed result.

    Args:
        folder: The experiment's folder, which has a ``reproduce.yaml``.
        output: Directory of the new result.
        update: Replace the committed result by the new one instead of comparing.
    """
    recipe = yaml.safe_load((folder / "reproduce.yaml").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    for line in recipe["commands"]:
        command = [part.format(output=output) for part in shlex.split(line)]
        sys.stdout.write(f"$ {shlex.join(command)}\n")
        sys.stdout.flush()
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{folder}: the command above failed; to begin anew, delete {output}")
    committed, fresh = folder / recipe["result"], output / recipe.get("fresh", recipe["result"])
    if update:
        shutil.copyfile(fresh, committed)
        for name in recipe.get("also", []):
            shutil.copyfile(output / name, folder / name)
        return 0
    return compare(str(committed), str(fresh), str(folder / "reproduce.yaml"))


if __name__ == "__main__":
    sys.exit(auto_cli(main))
