"""Does every answer keep its schema, and what does that cost?

usage: python experiments/json_schemas/run.py [--model DIRECTORY] [--num_schemas N] [--output FILE]
       python experiments/json_schemas/run.py --converted DIRECTORY [--num_schemas N] [--output FILE]

Answers each prompt of schemas.jsonl by construction, and freely, with the schema in the prompt only: with
`Autoregressive` and with `SelfSpeculative` where it always drafts. Python's parser and the package jsonschema
judge. `nox -s real_model -- fetch` fetches the model. `--converted` takes a model that refusion_pays has converted:
`ReFusion` fills templates that are made from the schemas, so that the decoder is free in its order.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import torch

from refusion_lit import TextModel, load
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion, SelfSpeculative
from refusion_lit.reports.results import environment
from refusion_lit.types import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, write_json
from experiments.lossless.table import BASE

HERE = Path(__file__).parent
RUNS: dict[str, tuple[Decoder, bool]] = {
    "SelfSpeculative, two_forwards": (SelfSpeculative(layout="two_forwards"), True),
    "SelfSpeculative, free": (SelfSpeculative(layout="two_forwards"), False),
    "Autoregressive": (Autoregressive(), True),
    "Autoregressive, free": (Autoregressive(), False),
}
"""Decoders, and whether the schemas are kept by construction."""
CONVERTED: dict[str, tuple[Decoder, bool]] = {
    "ReFusion, mask": (ReFusion(slot_size=8, num_serial_blocks=4), True),
    "ReFusion, bonus": (ReFusion(slot_size=32, num_serial_blocks=8, infill="bonus", num_drafts=3), True),
}
"""Those of a converted model."""


def is_kept(text: str, schema: Any) -> tuple[bool, bool]:
    """Return whether a text parses as JSON, and whether it keeps a schema."""
    try:
        value = json.loads(text)
    except ValueError:
        return False, False
    return True, not list(jsonschema.Draft202012Validator(schema).iter_errors(value))


def answered(
    model: TextModel, asked: Sequence[Mapping[str, Any]], decoder: Decoder, sampling: SamplingParams, *, kept: bool
) -> dict[str, Any]:
    """Answer all prompts, one by one if schemas are kept by construction; return the counts and the answers."""
    rows = []
    refused = {}
    started = time.process_time()
    prompts = [
        f"{question['prompt']} Answer only with JSON of this schema: {json.dumps(question['schema'])}"
        for question in asked
    ]
    if not kept:
        generations = model.generate(prompts, decoder=decoder, sampling=sampling, batch_size=16)
        rows = list(zip(asked, generations, strict=True))
    for prompt, question in zip(prompts, asked, strict=True) if kept else ():
        try:
            [row] = model.generate([prompt], decoder=decoder, sampling=sampling, json_schema=question["schema"])
            rows.append((question, row))
        except ValueError as error:
            refused[question["name"]] = str(error)
    judged = [is_kept(row.text, question["schema"]) for question, row in rows]
    num_tokens = sum(row.num_tokens for _, row in rows)
    num_forwards = sum(row.num_forwards for _, row in rows)
    return {
        "asked": len(asked),
        "answered": len(rows),
        "parse": sum(parses for parses, _ in judged),
        "keep_the_schema": sum(keeps for _, keeps in judged),
        "refused": refused,
        "tokens": num_tokens,
        "forwards": num_forwards,
        "tokens_per_forward": round(num_tokens / num_forwards, 3),
        "cpu_ms_per_forward": round(1e3 * (time.process_time() - started) / num_forwards, 1),
        "answers": {question["name"]: row.text for question, row in rows},
    }


def main() -> None:
    """Run all decoders and write the results."""
    parser = argument_parser(__doc__, "runs/json_schemas", None)
    parser.add_argument("--model", type=Path, default=BASE)
    parser.add_argument("--converted", type=Path, default=None, help="exported by refusion_pays, in place of --model")
    parser.add_argument("--draft", type=Path, default=HERE.parent / "lossless" / "drafter")
    parser.add_argument("--num_schemas", type=int, default=None)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = (HERE / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines][: options.num_schemas]
    converted = options.converted is not None
    output = options.output or HERE / ("converted.json" if converted else "results.json")
    if converted:
        model = load(options.converted, dtype="float32")
    else:
        model = load(options.model, dtype="float32", draft=options.draft)
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens)
    settings = {"max_new_tokens": options.max_new_tokens, "dtype": "float32", "threads": 1}
    described = environment(0, ["python", "experiments/json_schemas/run.py", *sys.argv[1:]])
    runs: dict[str, Any] = {}
    for name, (decoder, kept) in (CONVERTED if converted else RUNS).items():
        runs[name] = answered(model, asked, decoder, sampling, kept=kept)
        print(name, {key: value for key, value in runs[name].items() if key != "answers"}, flush=True)
        write_json(output, {**described, "settings": settings, "runs": runs})


if __name__ == "__main__":
    main()
