"""Training: time of a step with the hybrid objective against the autoregressive one, same backbone, same tokens.

usage: python -m benchmarks.training [--repeats 9] [--threads 1]

A step is corruption, forward, loss, backward and AdamW. The process's peak memory is taken for each objective in a
process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Literal

import torch
from benchmarks.common import VOCABULARY_HEAVY, Work, aim, interleaved, random_model, time_ratio, write
from benchmarks.loss_memory import peak_resident_bytes, resident_bytes
from jsonargparse import auto_cli

from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive, Hybrid, Objective
from refusion_lit.types import ResponseBatch

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 32,
    },
    "vocabulary-heavy": VOCABULARY_HEAVY,
}  # fmt: skip
OBJECTIVES: dict[str, Objective] = {"hybrid": Hybrid(), "autoregressive": Autoregressive()}


def batch_of(rows: int, prompt: int, response: int, vocab: int, seed: int = 0) -> ResponseBatch:
    """Draw a batch of equally long samples: both objectives then see the same number of positions."""
    generator = torch.Generator().manual_seed(seed)
    return ResponseBatch(
        input_ids=torch.randint(3, vocab - 1, (rows, prompt + response), generator=generator),
        prompt_lengths=torch.full((rows,), prompt),
        response_lengths=torch.full((rows,), response),
        sample_keys=torch.arange(rows) * 7919,
    )


def step_of(model: Backbone, objective: Objective, batch: ResponseBatch) -> Work:
    """Return the work of one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    epochs = iter(range(1_000_000))

    def run() -> dict[str, Any]:
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=next(epochs))
        corrupted = objective.corrupt(batch, noise, model.special_tokens)
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.attention_mask)
        objective.loss(hidden, model.logits, corrupted).total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"num_tokens": batch.num_tokens, "num_labels": int((corrupted.labels != -100).sum())}

    return Work(run)


def _alone(model: str, objective: str, shape: tuple[int, int, int], threads: int) -> float:
    """Return the extra megabytes of two steps in a fresh process."""
    arguments = [sys.executable, "-m", "benchmarks.training", "--alone", objective, "--model", model,
                 "--shape", json.dumps(shape), "--threads", str(threads)]  # fmt: skip
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def _measure_alone(model: str, objective: str, shape: tuple[int, int, int]) -> None:
    options = MODELS[model]
    backbone = random_model(options)
    small = batch_of(1, 4, 4, options["vocab_size"])
    step = step_of(backbone, OBJECTIVES[objective], batch_of(*shape, options["vocab_size"]))
    step_of(backbone, OBJECTIVES[objective], small).run()  # loads kernels
    before = resident_bytes()
    step.run()
    step.run()
    print(round((peak_resident_bytes() - before) / 2**20, 1))


def main(
    repeats: int = 9,
    threads: int = 1,
    shape: tuple[int, int, int] | None = None,
    model: Literal["small", "vocabulary-heavy"] | None = None,
    alone: Literal["hybrid", "autoregressive"] | None = None,
    output: str | None = None,
) -> None:
    """Measure training steps.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        shape: Rows, prompt tokens, response tokens; by default 32, 18, 46 (small) and 2, 32, 96 (vocabulary-heavy).
        model: Measure this model only.
        alone: Print the memory of this objective's steps in megabytes and stop.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    shapes = {"small": shape or (32, 18, 46), "vocabulary-heavy": shape or (2, 32, 96)}
    if alone is not None:
        chosen = model or "small"
        _measure_alone(chosen, alone, shapes[chosen])
        return
    cases, aims = {}, []
    for name in [model] if model else list(MODELS):
        options = MODELS[name]
        backbone = random_model(options)
        batch = batch_of(*shapes[name], options["vocab_size"])
        works = {label: step_of(backbone, objective, batch) for label, objective in OBJECTIVES.items()}
        interleaved(works, repeats)
        ratio = time_ratio(works["hybrid"], works["autoregressive"])
        cases[name] = {
            "runs": {
                label: {**work.summary(), "extra_megabytes": _alone(name, label, shapes[name], threads)}
                for label, work in works.items()
            },
            "hybrid_over_autoregressive": round(ratio, 3),
        }
        aims.append(aim(f"training step, {name}: hybrid over autoregressive", ratio, 1.15, at_least=False))
    config = {"repeats": repeats, "threads": threads, "shapes": shapes, "models": MODELS}
    seconds = time.perf_counter() - started
    write("training", config, {"aims": aims, "cases": cases}, output=output, seconds=seconds, seed=0)


if __name__ == "__main__":
    auto_cli(main)
