"""Training: time of a step with every objective against the autoregressive one, and of packed rows against padded ones.

usage: python -m benchmarks.training [--repeats 9] [--threads 1]

A step is corruption, forward, loss, backward and AdamW, same backbone and samples. The process's peak memory is
taken for each objective in a process of its own. Packing: samples with lengths like GSM8K's (log-normal).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

import torch
from benchmarks.common import (
    VOCABULARY_HEAVY,
    Work,
    alone,
    interleaved,
    peak_resident_bytes,
    random_model,
    resident_bytes,
    summary_line,
    time_ratio,
    write,
)
from jsonargparse import auto_cli

from refusion_lit.data.batches import collate_packed, collate_responses
from refusion_lit.data.datasets import pack_samples
from refusion_lit.data.examples import EncodedExample
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.learning.packing import pack
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive, BlockMasked, Hybrid, Masked, Objective

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 32,
    },
    "vocabulary-heavy": VOCABULARY_HEAVY,
}  # fmt: skip
OBJECTIVES: dict[str, Objective] = {
    "autoregressive": Autoregressive(), "hybrid": Hybrid(), "masked": Masked(), "block": BlockMasked(),
}  # fmt: skip
PACK_LENGTH, NUM_ROWS = 512, 4


def draw_batch(rows: int, prompt: int, response: int, vocab: int, seed: int = 0) -> ResponseBatch:
    """Draw a batch of equally long samples: both objectives then see the same number of positions."""
    generator = torch.Generator().manual_seed(seed)
    return ResponseBatch(
        input_ids=torch.randint(3, vocab - 1, (rows, prompt + response), generator=generator),
        prompt_lengths=torch.full((rows,), prompt),
        response_lengths=torch.full((rows,), response),
        sample_keys=torch.arange(rows) * 7919,
    )


def make_step(model: Backbone, objective: Objective, batch: ResponseBatch) -> Work:
    """Return the work of one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    epochs = iter(range(1_000_000))

    def run() -> dict[str, Any]:
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=next(epochs))
        corrupted = objective.corrupt(batch, noise, model.special_tokens)
        if batch.rows is not None:
            corrupted = pack(corrupted, batch.rows, pad_token_id=0)
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        objective.loss(hidden, model.logits, corrupted).total.backward()
        optimizer.step()
        optimizer.zero_grad()
        num_tokens = int(batch.ends.sum())
        return {"num_tokens": num_tokens, "num_labels": int((corrupted.labels != -100).sum())}

    return Work(run)


def ragged_batches(vocab: int) -> tuple[ResponseBatch, ResponseBatch]:
    """Return the same samples padded and packed; about two fifths of each are its prompt."""
    generator = torch.Generator().manual_seed(1)
    count = 64 * NUM_ROWS
    lengths = (150 * (0.36 * torch.randn(count, generator=generator)).exp()).long().clamp(20, PACK_LENGTH)
    tokens = torch.randint(3, vocab - 1, (count, PACK_LENGTH), generator=generator)
    samples = [
        EncodedExample(str(i), tokens[i, : 2 * n // 5].tolist(), tokens[i, 2 * n // 5 : n].tolist())
        for i, n in enumerate(lengths.tolist())
    ]
    rows = pack_samples([len(sample) for sample in samples], PACK_LENGTH, seed=0)
    rows = rows[:: len(rows) // NUM_ROWS][:NUM_ROWS]  # the first ones hold the longest samples
    chosen = [samples[i] for row in rows for i in row]
    return collate_responses(chosen, 0), collate_packed([[samples[i] for i in row] for row in rows], 0)


def packing(repeats: int) -> dict[str, Any]:
    """Compare packed rows with padded ones, hybrid objective, small model."""
    options = MODELS["small"]
    backbone = random_model(options)
    padded, packed = ragged_batches(options["vocab_size"])
    works = {name: make_step(backbone, OBJECTIVES["hybrid"], batch) for name, batch in
             (("padded", padded), ("packed", packed))}  # fmt: skip
    interleaved(works, repeats)
    return {
        "num_samples": len(padded.input_ids),
        "shapes": {"padded": list(padded.input_ids.shape), "packed": [NUM_ROWS, PACK_LENGTH]},
        "runs": {name: work.summary() for name, work in works.items()},
        "packed_over_padded": round(time_ratio(works["packed"], works["padded"]), 3),
    }


def extra_megabytes(model: str, objective: str, shape: tuple[int, int, int], threads: int) -> float:
    """Return the memory that two steps take in this process, in megabytes."""
    torch.set_num_threads(threads)
    options = MODELS[model]
    backbone = random_model(options)
    small = draw_batch(1, 4, 4, options["vocab_size"])
    step = make_step(backbone, OBJECTIVES[objective], draw_batch(*shape, options["vocab_size"]))
    make_step(backbone, OBJECTIVES[objective], small).run()  # loads kernels
    before = resident_bytes()
    step.run()
    step.run()
    return round((peak_resident_bytes() - before) / 2**20, 1)


def main(
    repeats: int = 9,
    threads: int = 1,
    shape: tuple[int, int, int] | None = None,
    model: Literal["small", "vocabulary-heavy"] | None = None,
    output: str | None = None,
) -> None:
    """Measure training steps.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        shape: Rows, prompt tokens, response tokens; by default 32, 18, 46 (small) and 2, 32, 96 (vocabulary-heavy).
        model: Measure this model only.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    shapes: dict[str, tuple[int, int, int]] = {"small": shape or (32, 18, 46), "vocabulary-heavy": shape or (2, 32, 96)}
    cases, summary = {}, []
    for name in [model] if model else list(MODELS):
        options = MODELS[name]
        backbone = random_model(options)
        batch = draw_batch(*shapes[name], options["vocab_size"])
        works = {label: make_step(backbone, objective, batch) for label, objective in OBJECTIVES.items()}
        interleaved(works, repeats)
        ratios = {label: round(time_ratio(work, works["autoregressive"]), 3) for label, work in works.items()}
        memory = partial(alone, "training", "extra_megabytes", model=name, shape=shapes[name], threads=threads)
        cases[name] = {
            "runs": {
                label: {**work.summary(), "extra_megabytes": memory(objective=label)} for label, work in works.items()
            },
            "over_autoregressive": ratios,
        }
        summary.append(summary_line(f"training step, {name}: hybrid over autoregressive", ratios["hybrid"]))
    config = {"repeats": repeats, "threads": threads, "shapes": shapes, "models": MODELS}
    results = {"summary": summary, "cases": cases, "packing": packing(repeats)}
    write("training", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
