"""How many tokens per forward does a converted SmolLM2 make with each decoder, and what are its texts worth?

usage: python experiments/refusion_pays/real_model.py --prompts GSM8K_TEST.jsonl@24 NAME=CHECKPOINT ... [--output FILE]

NAME names a training and its step. Each prompt is decoded alone by every decoder in turn, so that other work on
the machine meets all of them; times are processor time of one thread. `--decoders` measures some of them only. The
reference is the base's own answer, decoded by `Autoregressive`; transformers' `generate` decodes the base, too.
Perplexity is the texts' perplexity under the base. Finished parts of the output are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import refusion_lit
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion, SelfSpeculative
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import library_generate, write_json
from experiments.lossless.table import BASE, read_prompts, speed_over

BLOCK = 32
"""Tokens of a warm-up, and of a serial block."""


def decoders(max_new_tokens: int) -> dict[str, Decoder]:
    """Return what is compared."""

    def refusion(slot_size: int, slots_per_block: int, infill: Any = "bonus", **options: Any) -> ReFusion:
        num_blocks = max(max_new_tokens // (slot_size * slots_per_block), 1)
        options = {"slot_threshold": 0.5, "token_threshold": 0.5, **options}
        return ReFusion(slot_size=slot_size, num_serial_blocks=num_blocks, infill=infill, **options)

    loose = {"slot_threshold": 0.6, "token_threshold": 0.6}
    return {
        "SelfSpeculative, one slot": SelfSpeculative(slot_size=max_new_tokens, num_drafts=3),
        "SelfSpeculative, single_forward": SelfSpeculative(
            slot_size=max_new_tokens, num_drafts=3, layout="single_forward"
        ),
        "ReFusion mask 4x8": refusion(4, 8, "mask", **loose),
        "ReFusion mask 8x4": refusion(8, 4, "mask", **loose),
        "ReFusion bonus 4x8": refusion(4, 8, **loose),
        "ReFusion bonus 8x4": refusion(8, 4, **loose),
        "ReFusion bonus 32x1": refusion(32, 1, num_drafts=3),
        "ReFusion bonus 16x2": refusion(16, 2, num_drafts=3),
    }


def perplexity(base: refusion_lit.TextModel, prompt: Prompt, tokens: list[int]) -> tuple[float, int]:
    """Return the negative log-likelihood of a text under the base, in nats, and its number of tokens."""
    ids = torch.tensor([[*prompt.token_ids, *tokens]])
    model: Any = base.backbone.model
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt.token_ids) - 1 : -1]
    losses = torch.nn.functional.cross_entropy(logits.float(), ids[0, len(prompt.token_ids) :], reduction="sum")
    return float(losses), len(tokens)


def compared(
    base: refusion_lit.TextModel, model: refusion_lit.TextModel, prompts: list[Prompt], max_new_tokens: int,
    names: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Decode all prompts with the named decoders in turn; return figures by decoder."""
    sampling, short = SamplingParams(max_new_tokens=max_new_tokens), SamplingParams(max_new_tokens=BLOCK)
    ways = {"base, Autoregressive": (base, Autoregressive())}
    ways |= {name: (model, decoder) for name, decoder in decoders(max_new_tokens).items() if name in names}
    rows: dict[str, list[Any]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    library: list[tuple[int, float]] = []
    for prompt in prompts:
        for name, (loaded, decoder) in ways.items():
            loaded.decode([prompt], decoder.adapt_to(short), short) if not rows[name] else None  # warms up
            started = time.process_time()
            rows[name] += loaded.decode([prompt], decoder, sampling).rows
            seconds[name].append(time.process_time() - started)
        library_generate(base, prompt, BLOCK) if not library else None
        started = time.process_time()
        library.append((library_generate(base, prompt, max_new_tokens), time.process_time() - started))
    reference = rows["base, Autoregressive"]
    result = {}
    for name, generations in rows.items():
        num_tokens = sum(row.num_tokens for row in generations)
        losses = [perplexity(base, prompt, row.token_ids) for prompt, row in zip(prompts, generations, strict=True)]
        prefixes = [_common(row.token_ids, exact.token_ids) for row, exact in zip(generations, reference, strict=True)]
        result[name] = {
            "tokens_per_forward": round(num_tokens / sum(row.num_forwards for row in generations), 3),
            "positions_per_token": round(sum(row.num_positions for row in generations) / num_tokens, 2),
            "tokens_per_second": round(num_tokens / sum(seconds[name]), 2),
            "num_tokens": [
                row.num_tokens for row in generations
            ],  # per prompt, so that intervals can be computed again
            "num_forwards": [row.num_forwards for row in generations],
            "seconds": [round(value, 4) for value in seconds[name]],
            "ended": sum(row.finish_reason == "eos" for row in generations),
            "identical": sum(
                row.token_ids == exact.token_ids for row, exact in zip(generations, reference, strict=True)
            ),
            "common_prefix": round(sum(prefixes) / len(prefixes), 1),
            "perplexity_under_base": round(math.exp(sum(a for a, _ in losses) / sum(b for _, b in losses)), 2),
            "texts": [model.tokenizer.decode(list(row.token_ids)) for row in generations[:3]],
        }
    others = {
        "autoregressive": ([row.num_tokens for row in reference], seconds["base, Autoregressive"]),
        "generate": tuple(zip(*library, strict=True)),
    }
    for name, figures in result.items():
        loaded = [row.num_tokens for row in rows[name]], seconds[name]
        for title, other in others.items():
            figures |= speed_over(title, *loaded, *other)
    return result


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def main() -> None:
    """Measure all checkpoints and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", metavar="NAME=CHECKPOINT")
    parser.add_argument("--prompts", required=True, metavar="FILE@NUMBER")
    parser.add_argument("--max_new_tokens", type=int, default=160)
    parser.add_argument("--decoders", nargs="+", choices=[*decoders(BLOCK)], default=[*decoders(BLOCK)], metavar="NAME")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    cost = "fixed cost of a forward that decoders are told, in positions; accelerators' is 256, a CPU's 32"
    parser.add_argument("--forward_cost", type=float, default=None, help=cost)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("convert.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = refusion_lit.load(BASE, device="cpu", dtype=args.dtype)
    prompts = read_prompts(base, *args.prompts.split("@"))
    result: dict[str, Any] = {"runs": {}}
    if args.output.is_file():
        result = json.loads(args.output.read_text(encoding="utf-8"))
    for text in args.checkpoints:
        name, _, checkpoint = text.partition("=")
        if name in result["runs"]:
            continue
        model = refusion_lit.load(checkpoint, device="cpu", dtype=args.dtype)
        overrides = {} if args.forward_cost is None else {"forward_cost": args.forward_cost}
        with patch.multiple(type(model.backbone), **overrides) if overrides else nullcontext():
            by_decoder = compared(base, model, prompts, args.max_new_tokens, args.decoders)
        settings = {
            "max_new_tokens": args.max_new_tokens,
            "num_prompts": len(prompts),
            "dtype": args.dtype,
            **overrides,
        }
        result["runs"][name] = {**settings, "decoders": by_decoder, "environment": environment(0, sys.argv)}
        write_json(args.output, result)
        for decoder, figures in by_decoder.items():
            print(name, decoder, {key: value for key, value in figures.items() if key != "texts"}, flush=True)


if __name__ == "__main__":
    main()
