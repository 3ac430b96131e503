"""Decoding on a GPU in bfloat16, and how near it comes to what the memory's bandwidth allows.

usage: python -m benchmarks.gpu [--models '[qwen3-0.6b, qwen3-8b]'] [--batches '[1, 4, 16]']

Random weights in the shapes of Qwen3-0.6B and Qwen3-8B with replayed schedules. At small batches a forward cannot be
faster than its weights and cached keys and values can be read: the limit is that many bytes over the bandwidth that a
copy reaches on the same device. ``--models '[tiny]' --device cpu`` tries the program without a GPU; such figures mean
nothing.
"""

from __future__ import annotations

import gc
import time
import warnings
from typing import Any, Literal

import torch
from benchmarks.common import interleaved, random_model, random_prompts, speed_ratio, write
from benchmarks.peers import Variants, check_same_text, default_variants, library, ours, plain, replayed
from benchmarks.replay import SCHEDULES, Replay
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.kv_cache import KVCache

Body = Literal["lean", "compile", "flex_attention"]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip


def bandwidth(device: str, megabytes: int) -> float:
    """Return the bytes a second that a copy reads and writes on a device: the best of some."""
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        started = _now()
        target.copy_(source)
        best = min(best, _now() - started)
    return 2 * source.nbytes / best


def bytes_read(model: Backbone, num_calls: int, num_rows: int, mean_context: float) -> float:
    """Return the bytes of weights and cache that calls must read, each weight once a call.

    Of the embedding only a few rows are read, unless it is the head's weight too.
    """
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.model.get_input_embeddings().weight.nbytes
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.head.weight.itemsize
    return num_calls * (weights + num_rows * mean_context * entry)


class FlexBackbone(Backbone):
    """A backbone whose lean body uses flex attention, independent of the model's config."""

    def make_cache(self, num_rows: int) -> KVCache:
        usual = self.config._attn_implementation
        self.config._attn_implementation = "flex_attention"
        try:
            return super().make_cache(num_rows)  # the lean body is made here
        finally:
            self.config._attn_implementation = usual


def with_body(model: Backbone, body: Body) -> Backbone:
    """Return the same weights run in another way."""
    given = (model.model, model.traits, model.special_tokens)
    return {"lean": model, "compile": Backbone(*given, compile=True), "flex_attention": FlexBackbone(*given)}[body]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(
    models: tuple[Literal["qwen3-0.6b", "qwen3-8b", "tiny"], ...] = ("qwen3-0.6b", "qwen3-8b"),
    batches: tuple[int, ...] = (1, 4, 16),
    num_tokens: int = 128,
    prompt_length: int = 128,
    repeats: int = 5,
    variants: Variants | None = None,
    bodies: tuple[Body, ...] = ("lean", "compile", "flex_attention"),
    device: Literal["cuda", "cpu"] = "cuda",
    output: str | None = None,
) -> None:
    """Measure decoding on a GPU.

    Args:
        models: Shapes of the models.
        batches: Prompts that are decoded together.
        num_tokens: Tokens of an answer, a multiple of 16.
        prompt_length: Tokens of a prompt.
        repeats: Rounds of the interleaved timing.
        variants: Options of ReFusion by name.
        bodies: Ways to run the body: the lean one as it is, its steps compiled, or with flex attention.
        device: ``cpu`` only to try the program.
        output: Where to write the JSON.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "device: expected a CUDA device, found none. Run this on a machine with a GPU and a CUDA build of torch, "
            "or try the program with --device cpu --models '[tiny]'."
        )
    warnings.filterwarnings("ignore", message=".* does not fit this model")
    started = time.perf_counter()
    variants = variants or default_variants()
    measured_bandwidth = bandwidth(device, 1024 if device == "cuda" else 64)
    cases = []
    for name in models:
        model = random_model(SHAPES[name], dtype=torch.bfloat16, device=device)
        for label, schedule in SCHEDULES.items():
            replay = Replay(schedule, prompt_length, SHAPES[name]["vocab_size"] - 1)
            acting = {body: replayed(with_body(model, body), replay) for body in bodies}
            for size in batches:
                prompts = random_prompts(size, prompt_length)
                options = {"slot_size": 8, "num_serial_blocks": 1}
                same = {
                    variant if body == "lean" else f"{variant}, {body}":
                        ours(acting[body], ReFusion(**options, **more), prompts, num_tokens, size)
                    for variant, more in variants.items()
                    for body in bodies
                }  # fmt: skip
                names = list(same)
                if size == 1:
                    same["plain"] = plain(model, ReFusion(**options), prompts, num_tokens, replay)
                works = {
                    **same,
                    "autoregressive": ours(
                        acting[bodies[0]], Autoregressive(), prompts, num_tokens, size, max_repeats=2
                    ),
                    "generate": library(model, prompts, num_tokens, size, max_repeats=2),
                }
                interleaved(works, repeats)
                check_same_text(same)
                runs = {}
                for work_name, work in works.items():
                    summary = work.summary()
                    calls = summary.get("num_calls", summary["num_forwards"] / size)
                    read = bytes_read(model, calls, size, prompt_length + num_tokens / 2)
                    summary["bandwidth_limit_seconds"] = read / measured_bandwidth
                    summary["share_of_bandwidth_limit"] = read / measured_bandwidth / summary["median_seconds"]
                    runs[work_name] = summary
                ratios = {
                    f"{name} / {peer}": round(speed_ratio(works[name], works[peer]), 3)
                    for name in names
                    for peer in works
                    if peer not in names or peer == name.split(",")[0] != name
                }
                cases.append({"case": f"{name}, {label}, batch {size}", "runs": runs, "ratios": ratios})
        del model, acting, works, same
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    config = {
        "models": {name: SHAPES[name] for name in models}, "batches": batches, "num_tokens": num_tokens,
        "prompt_length": prompt_length, "repeats": repeats, "variants": variants, "bodies": bodies,
        "dtype": "bfloat16", "device": device,
    }  # fmt: skip
    results = {"bandwidth_bytes_per_second": measured_bandwidth, "cases": cases}
    write("gpu", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
