"""Random decodes with adversarial logits and every decoder; each is checked against the decoders' contract.

usage: python experiments/hard_tests/random_decodes.py [--num 1700] [--seed 0]

``--num`` is the number of decodes per decoder. tests/hardness/random_decodes.py draws and checks them. After each
decoder, random_decodes.json is written: decodes, prompts, tokens and forwards by decoder, and failures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_suffix(".json")
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from hardness.random_decodes import random_decodes  # noqa: E402
from refusion_lit.reports.results import environment  # noqa: E402
from support.decoder_cases import DECODERS  # noqa: E402


def main() -> None:
    """Run and write the result; the exit code says whether anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=1700)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoders: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    start = time.monotonic()
    described = environment(args.seed, ["random_decodes.py", *sys.argv[1:]])  # before the result changes the tree
    for cls in DECODERS:
        try:
            decoders[cls.__name__] = asdict(random_decodes(cls, num=args.num, seed=args.seed))
        except Exception:  # every exception is a failure to report
            failures[cls.__name__] = traceback.format_exc()
            print(failures[cls.__name__], file=sys.stderr)
        print(cls.__name__, decoders.get(cls.__name__, "failed"), flush=True)
        record = {
            "seed": args.seed,
            "num_decodes": sum(counts["decodes"] for counts in decoders.values()),
            "num_prompts": sum(counts["prompts"] for counts in decoders.values()),
            "num_failures": len(failures),
            "failures": failures,
            "decoders": decoders,
            "seconds": round(time.monotonic() - start),
            "versions": {name: version(name) for name in ("hypothesis", "torch", "numpy")},
            "environment": described,
        }
        RESULT.write_text(json.dumps(record, indent=2) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
