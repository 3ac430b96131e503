"""Do the fast paths on CPUs pay, each alone, against the plain operations that they stand for?

usage: python -m benchmarks.fast_paths [--repeats 7] [--output FILE]

Whole decodes, in turn in one process with one thread: once as they are, and once for each fast path with this path
replaced by what a reader would write first. A ratio is the time without the path over the time with all of them, the
median over rounds: above 1 the path pays. `nothing` replaces nothing, and shows the noise. Random weights in float32,
prompts of random tokens; greedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from benchmarks.common import (
    SMALL,
    VOCABULARY_HEAVY,
    Work,
    decoded,
    interleaved,
    random_model,
    random_prompts,
    time_ratio,
    write,
)
from jsonargparse import auto_cli
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.engine import sampler
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.fused import body, linear

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152,
}  # fmt: skip
"""The shape of SmolLM2-135M."""


def library_norm(self: body._Norm, x: Tensor) -> Tensor:
    """Normalise by torch's function alone; `_weight` is scaled where the fast path computes by hand."""
    scale = x.shape[-1] ** -0.5 if self._by_hand else 1.0
    return F.rms_norm(x, x.shape[-1:], None, self._eps).mul_(self._weight * scale)


PLAIN: dict[str, Callable[[], Any]] = {
    "greedy choice by numpy": lambda: mock.patch.object(sampler, "first_argmax", lambda x: x.argmax(-1)),
    "softmax in chunks": lambda: mock.patch.object(sampler, "_MAX_SOFTMAX", 1 << 60),
    "table of angles": lambda: mock.patch.object(body.FusedBody, "_rotation", body.FusedBody._angles),
    "norms by hand": lambda: mock.patch.object(body._Norm, "__call__", library_norm),
    "product and sum in one": lambda: mock.patch.object(
        linear.Linear, "add_to", lambda self, hidden, x: hidden.add_(self(x))
    ),
}
"""What replaces a fast path by plain operations."""

MODELS = {"small": SMALL, "SmolLM2's shape": SMOLLM2, "large vocabulary": VOCABULARY_HEAVY}
DECODERS: dict[str, Decoder] = {"autoregressive": Autoregressive(), "refusion": ReFusion(num_serial_blocks=1)}
BATCHES = {"small": (1, 16), "SmolLM2's shape": (1,), "large vocabulary": (1, 16)}


def compared(
    model: Backbone, decoder: Decoder, batch_size: int, ways: dict[str, Callable[[], Any]], repeats: int
) -> dict[str, Any]:
    """Return the time without each fast path over the time with all of them."""

    def make_work(replacing: Callable[[], AbstractContextManager[Any]]) -> Work:
        def run() -> dict[str, Any]:
            with replacing():
                output = decoded(model, decoder, random_prompts(batch_size, 64), 32, batch_size)
            return {"num_tokens": sum(row.num_tokens for row in output.rows), "num_calls": output.num_calls}

        return Work(run)

    works = {name: make_work(way) for name, way in {"as it is": nullcontext, "nothing": nullcontext, **ways}.items()}
    interleaved(works, repeats, clock=time.process_time)
    ratios = {name: round(time_ratio(works[name], works["as it is"]), 3) for name in ("nothing", *ways)}
    return {"without / with": ratios, "runs": {name: work.summary() for name, work in works.items()}}


def main(repeats: int = 7, output: str | None = None) -> None:
    """Measure.

    Args:
        repeats: Rounds of the interleaved timing.
        output: Where to write the JSON.
    """
    torch.set_num_threads(1)
    started, cases = time.perf_counter(), {}
    for shape, options in MODELS.items():
        model = random_model(options)
        for label, decoder in DECODERS.items():
            for batch_size in BATCHES[shape]:
                case = f"{shape}, batch {batch_size}, {label}"
                cases[case] = compared(model, decoder, batch_size, PLAIN, repeats)
                print(case, cases[case]["without / with"], flush=True)
    config = {"repeats": repeats, "threads": 1, "models": MODELS, "prompt_length": 64, "new_tokens": 32}
    write("fast_paths", config, {"cases": cases}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
