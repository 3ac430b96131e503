"""Train with each law of masking and fill holes, one run at a time; finished runs are skipped, so it can be killed.

usage: python experiments/infilling/run.py [--work_dir DIR] [--output FILE] [--tasks NAME ...] [--fit_only]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from refusion_lit.reports.environment import environment

HERE = Path(__file__).parent
PATTERNS = ("independent", "grouped")
TESTS = {"additions": ("holes",), "records": ("holes", "plain")}
"""With the text around the holes given, and the whole response from the query alone, which hides parts of the sums."""


def command(*args: str) -> None:
    """Run a refusion-lit command with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "refusion_lit.cli", *args, "--num_threads", "1"], check=True, env=environment)


def config(*names: str) -> list[str]:
    """Return the arguments that name config files."""
    return [item for name in names for item in ("--config", str(HERE / f"{name}.yaml"))]


def fit(task: str, pattern: str, work: Path) -> Path:
    """Train, unless that is done; return the run's directory."""
    name = f"{task}_{pattern}"
    run = work / "runs" / name
    trained = run / "fit" / "trained"  # written last: a training that was killed is repeated
    if not trained.exists():
        shutil.rmtree(run / "fit", ignore_errors=True)
        places = ["--runs_dir", str(work / "runs"), "--run_name", name, "--run_version", "fit"]
        files = config("../controlled_comparison/common", "common", task)
        command("fit", *files, *places, "--model.objective.init_args.mask_pattern", pattern)
        trained.touch()
    return run


def test(task: str, name: str, run: Path) -> dict[str, dict[str, float]]:
    """Test a trained model, unless that is done; return the figures of each decoder."""
    if not (run / name / "results.json").exists():
        shutil.rmtree(run / name, ignore_errors=True)
        places = ["--runs_dir", str(run.parent), "--run_name", run.name, "--run_version", name]
        overlay = () if name == "holes" else (f"{task}_{name}",)
        files = config("../controlled_comparison/common", "common", task, *overlay)
        command("test", *files, *places, "--ckpt_path", str(run / "fit" / "checkpoints" / "last.ckpt"))
    return json.loads((run / name / "results.json").read_text())["results"]


def main() -> None:
    """Run what is missing, and gather everything into results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work_dir", type=Path, default=Path("runs/infilling"))
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    parser.add_argument("--tasks", nargs="*", choices=tuple(TESTS), default=list(TESTS))
    parser.add_argument("--fit_only", action="store_true")
    args = parser.parse_args()
    rows = []
    for task in args.tasks:
        for pattern in PATTERNS:
            run = fit(task, pattern, args.work_dir)
            if not args.fit_only:
                rows += [
                    {"task": task, "mask_pattern": pattern, "test": name, "decoder": decoder, **figures}
                    for name in TESTS[task]
                    for decoder, figures in test(task, name, run).items()
                ]
    if rows:
        written = {"rows": rows, "environment": environment(0, ["python", "experiments/infilling/run.py"])}
        args.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
