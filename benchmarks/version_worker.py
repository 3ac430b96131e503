"""Decodes what ``benchmarks.versions`` asks for: a process of its own for each version, so it imports nothing of ours.

usage: python version_worker.py {ours,released} MODEL

Requests and answers are JSON, a line each. A request has a setting of the reference outputs, prompts and a batch size;
the answer has the seconds, the number of forwards and the responses up to their end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Responses = list[list[int]]
Decode = Callable[[dict[str, Any]], tuple[Responses, int]]


def ours(directory: str) -> Decode:
    """Return how this project decodes, whichever of its versions is on the path."""
    import refusion_lit
    from refusion_lit.decoding import ReFusion

    imported = str(refusion_lit.__file__)
    assert imported.startswith(os.environ["PYTHONPATH"]), f"another checkout is imported: {imported}"
    model = refusion_lit.load(directory)

    def decode(request: dict[str, Any]) -> tuple[Responses, int]:
        setting = request["setting"]
        decoder = ReFusion(
            slot_size=setting["slot_size"],
            num_serial_blocks=setting["serial_num_blocks"],
            slot_threshold=setting["slot_threshold"],
            token_threshold=setting["token_threshold"],
        )
        rows = model.generate_ids(
            request["prompts"], decoder=decoder, max_new_tokens=setting["gen_length"], batch_size=request["batch_size"]
        )
        return [row.token_ids for row in rows], sum(row.num_forwards for row in rows)

    return decode


def released(directory: str) -> Decode:
    """Return how the released program decodes: one prompt after the other."""
    from types import SimpleNamespace

    import torch
    from generate import Qwen3ForCausalLM, generate_refusion  # type: ignore[import-not-found] - the released program

    model = Qwen3ForCausalLM.from_pretrained(directory).eval()
    mask, eos = model.config.mask_token_id, model.config.eos_token_id
    tokenizer = SimpleNamespace(eos_token_id=eos)  # the program reads nothing else of it
    num_forwards = 0

    def count(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.register_forward_hook(count)

    def decode(request: dict[str, Any]) -> tuple[Responses, int]:
        nonlocal num_forwards
        num_forwards = 0
        figures = []
        for prompt in request["prompts"]:
            text, _ = generate_refusion(model, tokenizer, torch.tensor([prompt]), mask_id=mask, **request["setting"])
            response = text[0, len(prompt) :].tolist()
            figures.append(response[: response.index(eos) + 1] if eos in response else response)
        return figures, num_forwards

    return decode


def main() -> None:
    """Load the model, say so, and answer requests until there are none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    import torch

    torch.set_num_threads(1)
    decode = {"ours": ours, "released": released}[sys.argv[1]](sys.argv[2])
    ready = {"python": sys.version.split()[0], **{name: version(name) for name in ("torch", "transformers")}}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started, started_on_wall = time.process_time(), time.perf_counter()
        responses, num_forwards = decode(request)
        seconds, wall_seconds = time.process_time() - started, time.perf_counter() - started_on_wall
        answer = {
            "process_seconds": seconds, "wall_seconds": wall_seconds, "num_forwards": num_forwards,
            "responses": responses,
        }  # fmt: skip
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
