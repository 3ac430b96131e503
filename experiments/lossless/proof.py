"""Does SelfSpeculative write the model's own text? 10 000 random prompts on tiny models in float64, token by token.

usage: python experiments/lossless/proof.py [--num_prompts 10000] [--output FILE]

Every group of 100 prompts has its own random model, drafter, layout, batch size, length limit, temperature and stop
strings. In float64 rounding never decides between two tokens here, so a single different token is an error.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from refusion_lit.decoding import Autoregressive, Decoder, SelfSpeculative, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import Drafter, DrafterOptions
from refusion_lit.reports.environment import environment
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens

GROUP, VOCAB = 100, 8


def tiny_model(seed: int, num_masks: int) -> Backbone:
    """Make a random model with a random drafter; of so few tokens, chance drafts many rightly."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()  # pyright: ignore
    model.lm_head.weight.data *= 10
    special = SpecialTokens(mask_token_id=VOCAB - 1, pad_token_id=VOCAB - 2, eos_token_ids=(0,), vocab_size=VOCAB)
    backbone = Backbone(model, ModelTraits(attention="causal", predictions=("next_token",)), special)
    drafter = Drafter(backbone.body, DrafterOptions(num_masks=num_masks, rank=2))
    for up in drafter.up.values():
        torch.nn.init.normal_(up, std=0.02)
    backbone.attach(drafter.double())
    return backbone.eval()


def group(seed: int) -> dict[str, Any]:
    """Decode 100 prompts both ways; return how many texts are equal, and counts."""
    rng = random.Random(seed)
    model = tiny_model(seed, num_masks := rng.randint(1, 5))
    prompts = [
        Prompt(token_ids=tuple(rng.randrange(1, VOCAB - 2) for _ in range(rng.randint(1, 24))), id=str(i))
        for i in range(GROUP)
    ]
    sampling = SamplingParams(
        max_new_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]),
        seed=seed,
    )  # fmt: skip
    decoder = SelfSpeculative(
        layout=rng.choice(["auto", "single_forward", "two_forwards"]), num_drafts=rng.randint(1, num_masks),
        forward_cost=rng.choice([0, 4, 32]),
    )  # fmt: skip

    def rows(way: Decoder, size: int) -> list[Any]:
        return decode(model, way, prompts, sampling, max_batch_size=size).rows

    own, drafted = rows(Autoregressive(), GROUP), rows(decoder, rng.choice([1, 7, 32, GROUP]))
    return {
        "num_equal": sum(
            (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            for a, b in zip(own, drafted, strict=True)
        ),
        "num_tokens": sum(row.num_tokens for row in drafted),
        "num_forwards": sum(row.num_forwards for row in drafted),
        "num_greedy": GROUP * (sampling.temperature == 0),
        "num_ended": sum(row.finish_reason == "eos" for row in own),
    }  # fmt: skip


def main() -> None:
    """Decode all groups and write what was found; exit with 1 if a text differs."""
    parser = argparse.ArgumentParser(description="Compare texts with and without drafts.")
    parser.add_argument("--num_prompts", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=Path("runs/lossless_proof.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    counts: dict[str, int] = {"num_prompts": 0}
    for seed in range(args.num_prompts // GROUP):
        counts["num_prompts"] += GROUP
        for name, value in group(seed).items():
            counts[name] = counts.get(name, 0) + value
        if seed % 10 == 9:
            print(counts, flush=True)
    result = {
        **counts,
        "tokens_per_forward": round(counts["num_tokens"] / counts["num_forwards"], 3),
        "seconds": round(time.perf_counter() - started, 1),
        "environment": environment(0, sys.argv),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(counts["num_equal"] != counts["num_prompts"]))


if __name__ == "__main__":
    main()
