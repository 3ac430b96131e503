"""Random models, prompts and settings: block decoders give the texts and forwards of slow programs without a cache.

The programs follow the rules of the authors' programs (LLaDA2.0, LLaDA2.1, SDAR), in a few lines of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import BlockDiffusion, Decoder, TokenEditing, decode
from refusion_lit.engine.sampler import draw_tokens
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import stable_key
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.example_counts import examples
from support.fakes import MASK, SPECIAL
from support.slow_decoding import BANNED, cut, random_backbone

ENDS = SPECIAL.eos_token_ids
WORDS = [token for token in range(SPECIAL.vocab_size) if token not in {*BANNED, *ENDS}]
Run = tuple[list[int], int]
"""A text up to its first EOS, and the number of forwards."""
Choice = Callable[[dict[int, tuple[Tensor, float]], int], list[int]]
"""Places to unmask, from log-probabilities and the drawn token's probability by place, and the step's quota."""


def make_backbone(block_size: int, seed: int, scale: float) -> Backbone:
    """Return a random model that never prefers a token that no decoder draws."""
    traits = ModelTraits(attention="block_causal", block_size=block_size, predictions=("mask", "visible"))
    return random_backbone(seed, scale, traits)


def log_probabilities(backbone: Backbone, text: list[int]) -> Tensor:
    size = backbone.traits.block_size
    assert size is not None
    blocks = torch.arange(len(text)) // size
    visible = blocks[:, None] >= blocks
    hidden = backbone.hidden_states(torch.tensor([text]), torch.arange(len(text))[None], visible[None])
    return backbone.logits(hidden)[0].log_softmax(-1)


def begin(prompt: tuple[int, ...], length: int, size: int) -> list[int]:
    """Return prompt and masks up to the end of a block."""
    total = -(-(len(prompt) + length) // size) * size
    return [*prompt, *[MASK] * (total - len(prompt))]


def draw(scores: Tensor, name: str, num_forwards: int, temperature: float) -> tuple[list[int], list[float]]:
    """Return a token for every place, drawn with the decoder's noise, and its probability after the temperature."""
    if temperature == 0:
        best = scores.max(-1)
        return best.indices.tolist(), best.values.exp().tolist()
    keys = torch.tensor([stable_key("draw", 0, name, num_forwards, place) for place in range(len(scores))])
    tokens = draw_tokens(scores, SamplingParams(temperature=temperature), keys)
    return tokens.tolist(), (scores / temperature).softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()


def decode_with_edits(
    backbone: Backbone, prompt: tuple[int, ...], length: int, *, size: int, threshold: float, edit_threshold: float,
    max_post_steps: int, num_filled: int, stops: bool, name: str, temperature: float,
) -> Run:  # fmt: skip
    """LLaDA2.1: fill masks and edit tokens in the same forward; repeat without masks until nothing changes."""
    text, num_forwards, start = begin(prompt, length, size), 0, len(prompt)
    for block in range(start // size, len(text) // size):
        stop, num_post_steps = (block + 1) * size, 0
        places = range(max(block * size, start), stop)
        while True:
            masks = [place for place in places if text[place] == MASK]
            if not masks:
                num_post_steps += 1
                if num_post_steps > max_post_steps:
                    break
            tokens, likely = draw(log_probabilities(backbone, text[:stop]), name, num_forwards, temperature)
            num_forwards += 1
            filled = [place for place in masks if likely[place] > threshold]
            if len(filled) < num_filled:
                filled = sorted(masks, key=lambda place: -likely[place])[:num_filled]
            changed = filled + [
                place for place in places
                if place not in masks and tokens[place] != text[place] and likely[place] > edit_threshold
            ]  # fmt: skip
            for place in changed:
                text[place] = tokens[place]
            if not masks and not changed:
                break
        if stops and {*ENDS} & {*text[start:stop]}:
            break
    return cut(text[start : start + length], ENDS), num_forwards


def denoise(
    backbone: Backbone, prompt: tuple[int, ...], length: int, *, size: int, num_steps: int, choose: Choice, name: str,
    temperature: float,
) -> Run:  # fmt: skip
    """LLaDA2.0 and SDAR: unmask by a rule, at least the step's share; count the forwards until the text is final."""
    text, start = begin(prompt, length, size), len(prompt)
    writes: list[list[int]] = []
    for block in range(start // size, len(text) // size):
        stop = (block + 1) * size
        for step in range(num_steps):
            masks = [place for place in range(block * size, stop) if text[place] == MASK]
            if not masks:
                break
            scores = log_probabilities(backbone, text[:stop])
            tokens, likely = draw(scores, name, len(writes), temperature)
            quota = size // num_steps + (step < size % num_steps)
            chosen = choose({place: (scores[place], likely[place]) for place in masks}, quota)
            for place in chosen:
                text[place] = tokens[place]
            writes.append(chosen)
        assert MASK not in text[:stop]
        if {*ENDS} & {*text[start:stop]}:
            break
    output = cut(text[start : start + length], ENDS)
    return output, max(i + 1 for i, places in enumerate(writes) if min(places) < start + len(output))


def by_threshold(threshold: float) -> Choice:
    def choose(drafts: dict[int, tuple[Tensor, float]], quota: int) -> list[int]:
        above = [place for place, (_, probability) in drafts.items() if probability > threshold]
        best = sorted(drafts, key=lambda place: -drafts[place][1])[:quota]
        return above if len(above) >= quota else best

    return choose


def leftmost(drafts: dict[int, tuple[Tensor, float]], quota: int) -> list[int]:
    return sorted(drafts)[:quota]


def by_entropy(bound: float) -> Choice:
    def choose(drafts: dict[int, tuple[Tensor, float]], quota: int) -> list[int]:
        entropies = {place: -(score.exp() * score).sum().item() for place, (score, _) in drafts.items()}
        ranked = sorted(entropies, key=lambda place: entropies[place])
        sums = [sum(entropies[place] for place in ranked[: i + 1]) for i in range(len(ranked))]
        return ranked[: max(1, sum(total < bound for total in sums))]

    return choose


TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=11).map(tuple), min_size=1, max_size=4)
MODELS = st.builds(
    make_backbone, block_size=st.sampled_from([2, 4, 5, 8]), seed=st.integers(0, 9), scale=st.sampled_from([0.3, 1, 3])
)

TEMPERATURES = st.sampled_from([0.0, 0.0, 0.6, 1.4])


def check(
    backbone: Backbone, decoder: Decoder, prompts: list[tuple[int, ...]], length: int, temperature: float,
    reference: Callable[..., Run], **options: Any,
) -> None:  # fmt: skip
    """Compare a batch with the slow program, prompt by prompt."""
    batch = [Prompt(token_ids=tokens, id=str(i)) for i, tokens in enumerate(prompts)]
    sampling = SamplingParams(max_new_tokens=length, temperature=temperature)
    rows = decode(backbone, decoder, batch, sampling, batch_size=3).rows
    size = backbone.traits.block_size
    for prompt, row in zip(batch, rows, strict=True):
        draws = {"name": prompt.id, "temperature": temperature}
        expected = reference(backbone, prompt.token_ids, length, size=size, **draws, **options)
        assert (row.token_ids, row.num_forwards) == expected


@settings(max_examples=examples(60), deadline=None)
@given(
    backbone=MODELS, prompts=TEXTS, length=st.integers(1, 20), threshold=st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    edit_threshold=st.sampled_from([0.0, 0.3, 0.6, 1.0]), max_post_steps=st.sampled_from([0, 1, 2, 16]),
    num_filled=st.integers(1, 3), stops=st.booleans(), temperature=TEMPERATURES,
)  # fmt: skip
@torch.no_grad()
def test_token_editing(
    backbone: Backbone, prompts: list[tuple[int, ...]], length: int, threshold: float, edit_threshold: float,
    max_post_steps: int, num_filled: int, stops: bool, temperature: float,
) -> None:  # fmt: skip
    """LLaDA2.1's quality (0.7/0.5) and speed (0.5/none) modes are among such settings."""
    decoder = TokenEditing(
        block_size=backbone.traits.block_size or 0, mask_threshold=threshold, edit_threshold=edit_threshold,
        max_post_steps=max_post_steps, min_num_filled=num_filled, stop_at_eos=stops,
        confidence="tempered",
    )  # fmt: skip
    check(
        backbone, decoder, prompts, length, temperature, decode_with_edits, threshold=threshold,
        edit_threshold=edit_threshold, max_post_steps=max_post_steps, num_filled=num_filled, stops=stops,
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["dynamic", "static", "sequential", "entropy_bounded"])
@settings(max_examples=examples(30), deadline=None)
@given(
    backbone=MODELS, prompts=TEXTS, length=st.integers(1, 20), num_steps=st.integers(1, 8), bound=st.floats(0, 0.95),
    temperature=TEMPERATURES,
)  # fmt: skip
@torch.no_grad()
def test_block_diffusion(
    backbone: Backbone, prompts: list[tuple[int, ...]], length: int, num_steps: int, bound: float, temperature: float,
    rule: str,
) -> None:  # fmt: skip
    size = backbone.traits.block_size or 0
    num_steps = min(num_steps, size)
    if rule == "entropy_bounded":
        decoder = BlockDiffusion(block_size=size, sampling_rule="entropy_bounded", entropy_bound=4 * bound)
        check(backbone, decoder, prompts, length, temperature, denoise, num_steps=size, choose=by_entropy(4 * bound))
        return
    if rule == "sequential":
        decoder = BlockDiffusion(block_size=size, sampling_rule="sequential", num_steps=num_steps)
        check(backbone, decoder, prompts, length, temperature, denoise, num_steps=num_steps, choose=leftmost)
        return
    threshold = 1.0 if rule == "static" else bound
    decoder = BlockDiffusion(block_size=size, num_steps=num_steps, threshold=threshold, confidence="tempered")
    choose = by_threshold(threshold)
    check(backbone, decoder, prompts, length, temperature, denoise, num_steps=num_steps, choose=choose)
