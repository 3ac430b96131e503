"""Train with each law of masking and fill spans, one run at a time; it can be killed, and continues where it was.

usage: python experiments/infilling/run.py [--work_dir DIR] [--output FILE] [--tasks NAME ...] [--fit_only]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from refusion_lit.reports.results import environment

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, command, configs, places, train, write_json

HERE = Path(__file__).parent
PATTERNS = ("independent", "grouped")
TESTS = {"additions": ("holes",), "records": ("holes", "plain")}
"""With the text around the spans given, and the whole response from the query alone, which hides parts of the sums."""


def files(*names: str) -> list[str]:
    """Return the options that name the config files of all runs and these."""
    shared = HERE.parent / "controlled_comparison" / "common.yaml"
    return configs(shared, *(HERE / f"{name}.yaml" for name in ("common", *names)))


def fit(task: str, pattern: str, work: Path) -> Path:
    """Train, unless that is done; return the directory of training and tests."""
    run = work / "runs" / f"{task}_{pattern}"
    overlay = () if pattern == "independent" else (pattern,)
    return train(run / "fit", *files(task, *overlay)).parents[2]


def test(task: str, name: str, run: Path) -> dict[str, dict[str, float]]:
    """Test a trained model, unless that is done; return the figures of each decoder."""
    if not (run / name / "results.json").exists():
        shutil.rmtree(run / name, ignore_errors=True)
        overlay = () if name == "holes" else (f"{task}_{name}",)
        checkpoint = run / "fit" / "checkpoints" / "last.ckpt"
        command("test", *files(task, *overlay), *places(run / name), "--ckpt_path", str(checkpoint))
    return json.loads((run / name / "results.json").read_text())["results"]


def main() -> None:
    """Run what is missing, and gather everything into results.json."""
    parser = argument_parser(__doc__, "runs/infilling", HERE / "results.json")
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
        recorded = environment(0, ["python", "experiments/infilling/run.py"])
        write_json(args.output, {"rows": rows, "environment": recorded})


if __name__ == "__main__":
    main()
