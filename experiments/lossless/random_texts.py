"""Does SelfSpeculative write the model's own text? Random prompts on random models in float64, token by token.

usage: python experiments/lossless/random_texts.py [--vocab_sizes 8 1000] [--num_prompts 10000] [--output FILE]

Every group of 100 prompts has its own random model, drafter, layout, batch size, length limit, temperature and stop
strings; the reference is Autoregressive. One group in five has a hybrid model, decoded greedily; its reference is
a loop over slots from left to right that recomputes the whole text for each token. In float64, rounding never decides
between two tokens here, so a single different token is an error.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from refusion_lit.decoding import Autoregressive, Decoder, SelfSpeculative, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import Drafter, DrafterOptions
from refusion_lit.modeling.load import attach
from refusion_lit.reports.results import environment
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import write_json

GROUP = 100
"""Prompts per random model."""
VOCAB_SIZES = (8, 1000)
EOS = 0
HYBRID_EVERY = 5
LAYOUTS = (None, "single_forward", "two_forwards")
SIZES = (1, 7, 32, GROUP)


def tiny_model(seed: int, traits: ModelTraits, vocab_size: int = VOCAB_SIZES[0]) -> Backbone:
    """Make a random model in which chance drafts many tokens rightly: of 8 tokens, or with all embeddings alike."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()  # pyright: ignore
    model.lm_head.weight.data *= 10
    if vocab_size > VOCAB_SIZES[0]:
        model.model.embed_tokens.weight.data += 0.06 * torch.randn(config.hidden_size)
    special = SpecialTokens(
        mask_token_id=vocab_size - 1, pad_token_id=vocab_size - 2, eos_token_ids=(EOS,), vocab_size=vocab_size
    )
    return Backbone(model, traits, special).eval()


def attach_drafter(backbone: Backbone, num_masks: int) -> None:
    """Give a model a random drafter."""
    drafter = Drafter(backbone.body, DrafterOptions(num_masks=num_masks, rank=2))
    for up in drafter.up.values():
        torch.nn.init.normal_(up, std=0.02)
    attach(backbone, drafter.double())
    backbone.eval()


def join_tokens(token_ids: Sequence[int], **_: object) -> str:
    """Return one character per token."""
    return "".join(chr(ord("a") + token) for token in token_ids)


def slot_by_slot(backbone: Backbone, prompt: Prompt, slot_size: int, length: int) -> tuple[list[int], str]:
    """Decode one prompt of a hybrid model: a slot's first token is read at its mask, each other at the one before."""
    tokens: list[int] = []
    model: Any = backbone.model
    mask, pad = backbone.special_tokens.mask_token_id, backbone.special_tokens.pad_token_id
    while len(tokens) < length:
        ids = [*prompt.token_ids, *tokens, *[mask] * (len(tokens) % slot_size == 0)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        logits[[mask, pad]] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == EOS:
            return tokens, "eos"
    return tokens, "length"


def hybrid_group(seed: int, vocab_size: int) -> dict[str, int]:
    """Decode 100 prompts of a hybrid model both ways; return how many texts are equal, and counts."""
    rng = random.Random(seed)
    model = tiny_model(seed, ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot")), vocab_size)
    prompts, length, slot_size = random_prompts(rng, vocab_size), rng.randint(1, 40), rng.randint(1, 5)
    decoder = SelfSpeculative(slot_size=slot_size, layout=rng.choice(LAYOUTS), forward_cost=rng.choice([0, 4, 32]))
    sampling, size = SamplingParams(max_new_tokens=length), rng.choice(SIZES)
    texts = [slot_by_slot(model, prompt, slot_size, length) for prompt in prompts]
    return counted(texts, decode(model, decoder, prompts, sampling, batch_size=size).rows) | {
        "num_greedy": GROUP, "num_hybrid": GROUP
    }  # fmt: skip


def group(seed: int, vocab_size: int) -> dict[str, int]:
    """Decode 100 prompts of a model with a drafter both ways; return how many texts are equal, and counts."""
    rng = random.Random(seed)
    model = tiny_model(seed, ModelTraits(attention="causal", predictions=("next_token",)), vocab_size)
    attach_drafter(model, num_masks := rng.randint(1, 5))
    prompts = random_prompts(rng, vocab_size)
    sampling = SamplingParams(
        max_new_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]),
        seed=seed,
    )  # fmt: skip
    decoder = SelfSpeculative(
        layout=rng.choice(LAYOUTS), num_drafts=rng.randint(1, num_masks), forward_cost=rng.choice([0, 4, 32])
    )

    def rows(way: Decoder, size: int) -> list[Any]:
        return decode(model, way, prompts, sampling, batch_size=size, detokenize=join_tokens).rows

    if rng.random() < 0.5:  # stop strings of one and two tokens that do occur
        text = join_tokens(rows(Autoregressive(), GROUP)[0].token_ids)
        stop = {text[len(text) // 3 :][:1], text[len(text) // 2 :][:2]} - {""}
        sampling = replace(sampling, stop=tuple(sorted(stop)))

    exact = [(row.token_ids, row.finish_reason) for row in rows(Autoregressive(), GROUP)]
    counts = counted(exact, rows(decoder, rng.choice(SIZES)))
    return counts | {"num_greedy": GROUP * (sampling.temperature == 0), "num_hybrid": 0}


def random_prompts(rng: random.Random, vocab_size: int) -> list[Prompt]:
    """Return 100 prompts of 1 to 24 tokens."""
    return [
        Prompt(token_ids=tuple(rng.randrange(1, vocab_size - 2) for _ in range(rng.randint(1, 24))), id=str(i))
        for i in range(GROUP)
    ]


def counted(exact: list[tuple[list[int], str]], drafted: list[Any]) -> dict[str, int]:
    """Return how many texts end alike and are equal, and counts."""
    return {
        "num_equal": sum(a == (b.token_ids, b.finish_reason) for a, b in zip(exact, drafted, strict=True)),
        "num_tokens": sum(row.num_tokens for row in drafted),
        "num_forwards": sum(row.num_forwards for row in drafted),
        "num_ended": sum(reason == "eos" for _, reason in exact),
        "num_stopped": sum(reason == "stop" for _, reason in exact),
    }


def run(vocab_size: int, num_prompts: int) -> dict[str, Any]:
    """Decode all groups of one vocabulary size; return counts."""
    started = time.perf_counter()
    counts: dict[str, int] = {"num_prompts": 0}
    for seed in range(num_prompts // GROUP):
        counts["num_prompts"] += GROUP
        for name, value in (hybrid_group if seed % HYBRID_EVERY == 0 else group)(seed, vocab_size).items():
            counts[name] = counts.get(name, 0) + value
    tokens_per_forward = round(counts["num_tokens"] / counts["num_forwards"], 3)
    seconds = round(time.perf_counter() - started, 1)
    print(record := {"vocab_size": vocab_size, **counts, "tokens_per_forward": tokens_per_forward, "seconds": seconds})
    return record


def main() -> None:
    """Decode with models of all vocabulary sizes and write what was found; exit with 1 if a text differs."""
    parser = argparse.ArgumentParser(description="Compare texts with and without drafts.")
    parser.add_argument("--vocab_sizes", type=int, nargs="+", default=VOCAB_SIZES)
    parser.add_argument("--num_prompts", type=int, default=10_000, help="per vocabulary size")
    parser.add_argument("--output", type=Path, default=Path("runs/lossless_random_texts.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run(vocab_size, args.num_prompts) for vocab_size in args.vocab_sizes]
    write_json(args.output, {"runs": runs, "environment": environment(0, sys.argv)})
    sys.exit(int(any(run["num_equal"] != run["num_prompts"] for run in runs)))


if __name__ == "__main__":
    main()
