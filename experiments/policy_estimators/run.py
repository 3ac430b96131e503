"""Train the same model on the same rewards with each likelihood: exact, coupled bound, mean field, trajectories.

usage: python experiments/policy_estimators/run.py [--task additions] [--work_dir runs/policy_estimators]
       [--output FILE] [--seeds 0 1 2] [--only NAME ...] [--updates N]

The start model of the additions is that of policy_additions. Finished parts are skipped, and a training resumes, so it
can be killed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, configs, kept, write_json
from experiments.policy_additions.run import (
    CONFIGS,
    DECODERS,
    LOGGED,
    START_STEP,
    TASK,
    average,
    compared,
    curve,
    measured,
    start_model,
    trained,
)
from experiments.tasks import Latin

from refusion_lit.decoding import Decoder, ReFusion, SelfSpeculative
from refusion_lit.reports.results import environment
from refusion_lit.tasks import Sheet, Task

HERE = Path(__file__).parent
ESTIMATORS = ("exact", "coupled", "mean_field", "trajectory")
MORE = ("trajectory_slow",)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task, its start model and its decoders.

    Attributes:
        task: The task.
        step: Step of the start model.
        length: Length limit of answers.
        decoders: Both decoders that measure.
        overlays: Names of configs, for the start and for training on rewards.
        slot_size: Tokens per slot.
    """

    task: Task = TASK
    step: int = START_STEP
    length: int = 64
    decoders: dict[str, Decoder]
    overlays: tuple[str, ...] = ()
    slot_size: int = 8

    def options(self, estimator: str) -> list[str]:
        """Return the options of a training with an estimator."""
        overlays = [HERE / f"{name}.yaml" for name in self.overlays[1:]]
        files = configs(CONFIGS / "policy.yaml", HERE / "common.yaml", HERE / f"{estimator}.yaml", *overlays)
        files += ["--model.objective.init_args.likelihood.init_args.slot_size", str(self.slot_size)]
        for name in ["refusion"] if estimator.startswith("trajectory") else ["left_to_right", "refusion"]:
            files += [f"--model.decoders.{name}.init_args.slot_size", str(self.slot_size)]
        return files


SETTINGS = {
    "additions": Setting(decoders=DECODERS),
    "sheet": Setting(
        task=Sheet(num_train=400_000, num_validation=256, num_test=500),
        step=600,
        length=96,
        decoders=DECODERS,
        overlays=("start_sheet", "sheet"),
    ),
    "latin": Setting(
        task=Latin(num_grids=1, num_clues=20, num_train=17_000, num_validation=256, num_test=500),
        step=300,
        length=32,
        decoders={
            "left to right": SelfSpeculative(slot_size=1),
            "thresholds": ReFusion(slot_size=1, num_serial_blocks=2),
        },
        overlays=("start_latin", "latin"),
        slot_size=1,
    ),
}


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/policy_estimators", HERE / "results.json")
    parser.add_argument("--task", choices=list(SETTINGS), default="additions")
    about_start = (
        "where the start model is kept; by default in the work directory, for additions that of policy_additions"
    )
    parser.add_argument("--start_dir", type=Path, help=about_start)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_prompts", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=ESTIMATORS + MORE, default=list(ESTIMATORS), help="with exact")
    parser.add_argument("--updates", type=int, help="number of updates; by default the task config's")
    args = parser.parse_args()
    setting = SETTINGS[args.task]
    is_first = args.task == "additions"
    work = args.work_dir if is_first else args.work_dir / args.task
    output = args.output if is_first else args.output.with_name(f"{args.task}.json")
    start_dir = args.start_dir or (Path("runs/policy_additions") if is_first else work)
    start = start_model(start_dir, setting.step, *(HERE / f"{name}.yaml" for name in setting.overlays[:1]))

    def measure(model: Path) -> dict[str, Any]:
        return measured(model, args.num_prompts, setting.task, setting.decoders, setting.length)

    lengths = ("trainer.max_steps", "trainer.val_check_interval") if args.updates else ()
    updates = [f"--{name}={args.updates}" for name in lengths]
    before = kept(work / "before.json", measure, start)
    plain = {
        name: {key: value for key, value in figures.items() if key != "scores"} for name, figures in before.items()
    }
    results: dict[str, dict[str, Any]] = defaultdict(dict)
    measurements: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for seed in args.seeds:
        for name in args.only:
            part = f"{name}{seed}_{args.updates}" if args.updates else f"{name}{seed}"
            run = work / part / "fit"
            last, seconds = trained(run, start, seed, *setting.options(name), *updates)
            after = kept(work / f"{part}.json", measure, last)
            measurements[name].append(after)
            results[name][str(seed)] = {
                "seconds": round(seconds),
                **against(before, measurements["exact"][-1], after),
                "curve": curve(run, LOGGED),
            }
            config = {"task": args.task, "start_step": setting.step, "num_prompts": args.num_prompts}
            config |= {"updates": args.updates} if args.updates else {}
            exact = measurements["exact"]
            means = {
                key: against(before, average(exact[: len(rows)]), average(rows)) for key, rows in measurements.items()
            }
            record = {"before": plain, "results": results, "means": means}
            given = ["--task", args.task, *(["--updates", str(args.updates)] if args.updates else [])]
            about = environment(0, ["python", "experiments/policy_estimators/run.py", *given])
            write_json(output, {"config": {**config, "seeds": args.seeds}, **record, "environment": about})


def against(before: dict[str, Any], exact: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return figures with differences to the start, and the differences to the exact likelihood."""
    beside = compared(exact, after)
    return {
        "after": compared(before, after),
        "against_exact": {decoder: figures["difference_in_points"] for decoder, figures in beside.items()},
    }


if __name__ == "__main__":
    main()
