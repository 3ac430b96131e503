"""Train the same model on the same rewards with each likelihood: exact, coupled bound, mean field, trajectories.

usage: python experiments/policy_estimators/run.py [--work_dir runs/policy_estimators] [--output FILE] [--seeds 0 1 2]

The start model is that of policy_additions. Finished parts are skipped, and a training resumes, so it can be killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, configs, kept, write_json
from experiments.policy_additions.run import (
    CONFIGS,
    LOGGED,
    START_STEP,
    compared,
    curve,
    measured,
    start_model,
    trained,
)

from refusion_lit.reports.results import environment

HERE = Path(__file__).parent
ESTIMATORS = ("exact", "coupled", "mean_field", "trajectory")


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/policy_estimators", HERE / "results.json")
    parser.add_argument("--start_dir", type=Path, default=Path("runs/policy_additions"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_prompts", type=int, default=500)
    args = parser.parse_args()
    start = start_model(args.start_dir)
    before = kept(args.work_dir / "before.json", measured, start, args.num_prompts)
    plain = {name: {key: value for key, value in each.items() if key != "scores"} for name, each in before.items()}
    results: dict[str, dict[str, Any]] = {}
    exact: dict[str, Any] = {}
    for seed in args.seeds:
        for name in ESTIMATORS:
            run = args.work_dir / f"{name}{seed}" / "fit"
            options = configs(CONFIGS / "policy.yaml", HERE / "common.yaml", HERE / f"{name}.yaml")
            last, seconds = trained(run, start, seed, *options)
            after = kept(args.work_dir / f"{name}{seed}.json", measured, last, args.num_prompts)
            found = {"seconds": round(seconds), "after": compared(before, after), "curve": curve(run, LOGGED)}
            exact = after if name == ESTIMATORS[0] else exact
            against = compared(exact, after)
            found["against_exact"] = {decoder: each["difference_in_points"] for decoder, each in against.items()}
            results.setdefault(name, {})[str(seed)] = found
            config = {"start_step": START_STEP, "num_prompts": args.num_prompts, "seeds": args.seeds}
            about = environment(0, ["python", "experiments/policy_estimators/run.py"])
            write_json(args.output, {"config": config, "before": plain, "results": results, "environment": about})


if __name__ == "__main__":
    main()
