"""Train SmolLM2 with adapters on rewards of form and arithmetic, and write the figures of each update.

usage: python experiments/policy_real/run.py --base DIR --train GSM8K.jsonl [--work_dir runs/policy_real]
       [--output FILE] [--only_figures]

The training resumes, so it can be killed. ``--only_figures`` writes those of the updates that are done.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, configs, write_json
from experiments.policy_additions.run import LOGGED, curve, trained

from refusion_lit.reports.results import environment

HERE = Path(__file__).parent


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/policy_real", HERE / "results.json")
    parser.add_argument("--base", type=Path, required=True, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's training questions")
    parser.add_argument("--only_figures", action="store_true")
    args = parser.parse_args()
    run = args.work_dir / "seed0" / "fit"
    if not args.only_figures:
        trained(run, args.base, 0, *configs(HERE / "policy.yaml"), "--data.task.init_args.train", str(args.train))
    points = curve(run, (*LOGGED, "overlong"), every=1)
    found = {"results": {"seed 0": {"curve": points}}}
    about = environment(0, ["python", "experiments/policy_real/run.py"])
    write_json(args.output, {"config": {"num_updates": len(points)}, **found, "environment": about})


if __name__ == "__main__":
    main()
