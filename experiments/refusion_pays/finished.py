"""Keep the answers that ended: a model trained on an answer that was cut at the length limit learns to stop anywhere.

usage: python experiments/refusion_pays/finished.py ANSWERS.jsonl ... --eos ID --output FILE

Writes each question's first answer whose last token is EOS.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from refusion_lit.evaluation.predictions import read_json_lines


def main() -> None:
    """Join the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("answers", nargs="+", type=Path)
    parser.add_argument("--eos", type=int, default=2, help="the model's EOS token; default: SmolLM2's")
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    kept: dict[str, str] = {}
    num_answers = 0
    for path in args.answers:
        for row in read_json_lines(path, "answers", texts=("id", "response")):
            num_answers += 1
            if row["response_ids"][-1:] == [args.eos]:
                kept.setdefault(row["id"], json.dumps(row))
    args.output.write_text("\n".join([*kept.values(), ""]), encoding="utf-8")
    print(f"{len(kept)} of {num_answers} answers ended: {args.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
