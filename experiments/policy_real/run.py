"""Train SmolLM2 with adapters on rewards of form and arithmetic; figures of each update, and test before and after.

usage: python experiments/policy_real/run.py --base DIR --train GSM8K.jsonl --test GSM8K_TEST.jsonl
       [--seeds 0 1 2] [--work_dir runs/policy_real] [--output FILE] [--num_prompts 60]

The training resumes, so it can be killed. Test answers are drawn as in roll-outs: temperature 1, at most 40 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, configs, kept, write_json
from experiments.policy_additions.run import LOGGED, average, compared, curve, trained
from experiments.policy_real.rewards import Ended, Format, RightArithmetic, ShortGsm8k

import refusion_lit
from refusion_lit.decoding import Autoregressive
from refusion_lit.reports.results import environment
from refusion_lit.types import SamplingParams

HERE = Path(__file__).parent
SAMPLING = SamplingParams(max_new_tokens=40, temperature=1.0, seed=0)
REWARDS = (Ended(weight=0.5), Format(), RightArithmetic())


def scored(model: Path, test: Path, num_prompts: int) -> dict[str, Any]:
    """Answer test questions once each; return scores per question: the reward, its parts, and the right number."""
    loaded = refusion_lit.load(str(model), dtype="float32")
    task = ShortGsm8k(test=str(test))
    examples = list(task.examples("test"))[:num_prompts]
    texts = [loaded.encode(example.query) for example in examples]
    prompts = [refusion_lit.Prompt(token_ids=tuple(ids), id=e.id) for ids, e in zip(texts, examples, strict=True)]
    rows = loaded.decode(prompts, Autoregressive(), SAMPLING, batch_size=30).rows
    answers = [row.text for row in rows]
    ended = [float(row.num_tokens < SAMPLING.max_new_tokens) for row in rows]
    parts = [reward.rewards(examples, answers) for reward in REWARDS]
    shares = {"ended": ended, "form": parts[1], "equations": parts[2]}
    weighted = [sum(r.weight * part[i] for r, part in zip(REWARDS, parts, strict=True)) for i in range(len(rows))]
    shares["reward"] = [value * end for value, end in zip(weighted, ended, strict=True)]
    shares["right number"] = [task.reward(e, text) for e, text in zip(examples, answers, strict=True)]
    print(model, *answers[:5], sep="\n", flush=True)
    num_tokens = sum(row.num_tokens for row in rows) / len(rows)
    return {
        name: {"mean": round(sum(scores) / len(scores), 4), "num_tokens": round(num_tokens, 1), "scores": scores}
        for name, scores in shares.items()
    }


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/policy_real", HERE / "results.json")
    parser.add_argument("--base", type=Path, required=True, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's training questions")
    parser.add_argument("--test", type=Path, required=True, help="GSM8K's test questions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_prompts", type=int, default=60)
    args = parser.parse_args()
    options = (*configs(HERE / "policy.yaml"), "--data.task.init_args.train", str(args.train))
    before = kept(args.work_dir / "before.json", scored, args.base, args.test, args.num_prompts)
    means = {
        name: {key: value for key, value in figures.items() if key != "scores"} for name, figures in before.items()
    }
    results, measurements = {}, []
    for seed in args.seeds:
        run = args.work_dir / f"seed{seed}" / "fit"
        last, seconds = trained(run, args.base, seed, *options)
        after = kept(args.work_dir / f"after{seed}.json", scored, last, args.test, args.num_prompts)
        measurements.append(after)
        points = curve(run, (*LOGGED, "overlong"), every=1)
        results[f"seed {seed}"] = {"seconds": round(seconds), "after": compared(before, after), "curve": points}
        config = {"num_updates": len(points), "num_prompts": args.num_prompts, "seeds": list(results)}
        record = {"before": means, "results": results, "mean": compared(before, average(measurements))}
        about = environment(0, ["python", "experiments/policy_real/run.py"])
        write_json(args.output, {"config": config, **record, "environment": about})


if __name__ == "__main__":
    main()
