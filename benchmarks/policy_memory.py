"""Memory of training on rewards, per answer: of an update, and of a roll-out's KV cache, each against its plan.

usage: python -m benchmarks.policy_memory [--numbers '[4, 8, 16]'] [--output FILE]

The update is forward, loss and backward of one micro-batch of answers on the small model, with prompts and answers of
128 tokens and slots of 8, each number of answers in a process of its own. Its plan: an answer takes P + L + L / 8
positions, and each what a position of supervised training takes (training_memory.json, hybrid). The plan of the cache
is what roll-outs check before they start: keys and values of P + L tokens in every layer.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from benchmarks.common import (
    RESULTS,
    SMALL,
    alone,
    decoded,
    peak_resident_bytes,
    random_model,
    reset_peak,
    resident_bytes,
    summary_line,
    write,
)
from jsonargparse import auto_cli

from refusion_lit.contrib.rl import GroupPolicy, LeftToRight
from refusion_lit.contrib.rl.likelihood import Answers
from refusion_lit.decoding import SelfSpeculative
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import Prompt

LENGTH, SLOT = 128, 8
OBJECTIVE = GroupPolicy(likelihood=LeftToRight(slot_size=SLOT), max_new_tokens=LENGTH)


def measure(number: int) -> float:
    """Return the extra megabytes of an update on this many answers in this process."""
    torch.set_num_threads(1)
    model = random_model(SMALL).train()

    def step(size: int) -> None:
        rng = torch.Generator().manual_seed(0)
        batch = Answers(
            input_ids=torch.randint(3, SMALL["vocab_size"] - 1, (size, 2 * LENGTH), generator=rng),
            prompt_lengths=torch.full((size,), LENGTH),
            response_lengths=torch.full((size,), LENGTH),
            sample_keys=torch.arange(size),
            advantages=torch.linspace(-1, 1, size),
        )
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
        corrupted = OBJECTIVE.corrupt(batch, noise, model.special_tokens)
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        OBJECTIVE.loss(hidden, model.head, corrupted).total.backward()

    step(2)  # loads kernels and makes gradients
    reset_peak()
    before = resident_bytes()
    step(number)
    return round((peak_resident_bytes() - before) / 2**20, 1)


def cache_bytes(number: int) -> float:
    """Return the bytes of KV cache per answer when this many are rolled out together."""
    model = random_model(SMALL)
    prompts = [Prompt(token_ids=tuple(range(3, 3 + LENGTH)), id=str(i)) for i in range(number)]
    return decoded(model, SelfSpeculative(slot_size=SLOT), prompts, LENGTH, number).cache_bytes / number


def main(numbers: tuple[int, ...] = (8, 16, 32), output: str | None = None) -> None:
    """Measure.

    Args:
        numbers: Answers of a micro-batch, at least two of them.
        output: Where to write the JSON.
    """
    started = time.perf_counter()
    megabytes = {str(number): alone("policy_memory", "measure", number=number) for number in numbers}
    slope = (megabytes[str(numbers[-1])] - megabytes[str(numbers[0])]) * 2**20 / (numbers[-1] - numbers[0])
    supervised = json.loads((RESULTS / "training_memory.json").read_text())["cases"]["hybrid"]["bytes_a_token"]
    positions = 2 * LENGTH + LENGTH // SLOT
    per_token = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"] * SMALL["head_dim"] * 4
    parts = {
        "update": {"bytes_an_answer": round(slope), "planned": positions * supervised, "megabytes": megabytes},
        "cache": {"bytes_an_answer": round(cache_bytes(numbers[0])), "planned": 2 * LENGTH * per_token},
    }
    summary = [
        summary_line(f"bytes per answer over the plan, {name}", part["bytes_an_answer"] / part["planned"])
        for name, part in parts.items()
    ]
    results: dict[str, Any] = {"parts": parts, "summary": summary}
    write("policy_memory", {"length": LENGTH, "slot_size": SLOT, "model": SMALL, "numbers": numbers}, results,
          output=output, seconds=time.perf_counter() - started, seed=0)  # fmt: skip


if __name__ == "__main__":
    auto_cli(main)
