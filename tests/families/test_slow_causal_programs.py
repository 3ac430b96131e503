"""Random models, prompts and settings: decoders of causal models give the texts and forwards of slow programs.

The programs follow the rules of I-DLM's IDLMBlockN and of the functions of Nemotron-Labs-Diffusion, without a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import CausalBlockDiffusion, Decoder, IntrospectiveStrided, LinearSpeculation, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.example_counts import examples
from support.fakes import MASK, SPECIAL
from support.slow_decoding import BANNED, compute, cut, random_backbone

ENDS = SPECIAL.eos_token_ids
WORDS = [token for token in range(SPECIAL.vocab_size) if token not in {*BANNED, *ENDS}]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(tuple), min_size=1, max_size=4)
TRAITS = ModelTraits(predictions=("mask_shifted", "block_mask", "next_token"))
MODELS = st.builds(
    random_backbone, seed=st.integers(0, 19), scale=st.sampled_from([0.1, 0.3, 1.0, 3.0]), traits=st.just(TRAITS)
)
THRESHOLDS = st.sampled_from([0.1, 0.3, 0.6, 0.9, 1.0])
BUDGETS = st.one_of(st.none(), st.integers(0, 12))
THINK_END = WORDS[4]
Text = tuple[int, ...]
Run = tuple[list[int], int]
"""A text up to its first EOS token, and the number of forward passes."""


def run(model: Backbone, decoder: Decoder, prompts: list[Text], length: int) -> list[Run]:
    """Decode prompts with the package's decoder, three at a time."""
    batch = [Prompt(token_ids=tokens, id=str(i)) for i, tokens in enumerate(prompts)]
    rows = decode(model, decoder, batch, SamplingParams(max_new_tokens=length), batch_size=3).rows
    return [(row.token_ids, row.num_forwards) for row in rows]


def read(model: Backbone, context: list[int], block: list[int], segments: list[int] | None = None) -> Tensor:
    """Return log-probabilities (token, vocabulary) of a context and a block of masks after it.

    The tokens of the block see the context and all of the block.

    Args:
        model: The model.
        context: Tokens before the block; none of them sees the block.
        block: The tokens of the block; empty: all is causal.
        segments: The segment of each context token, whose tokens see each other; ``None``: causal.
    """
    order = torch.arange(len(context)) if segments is None else torch.tensor(segments)
    order = torch.cat((order, torch.full((len(block),), int(order.max()) + 1)))
    tokens = [*context, *block]
    return compute(model, tokens, [*range(len(tokens))], order[:, None] >= order)


def decode_in_strides(model: Backbone, prompt: Text, length: int, *, size: int, num_verified: int | None) -> Run:
    """Verify drafts and make the next drafts in one forward pass; all attention is causal."""
    text = [int(read(model, [*prompt], [])[-1].argmax())]
    num_forwards = 1
    drafts: list[int] = []
    while True:  # even a text that is complete after the first forward pass takes a second one
        known = [*prompt, *text]
        scores = read(model, [*known, *drafts, *[MASK] * (size - 1)], [])
        best = (
            scores[len(known) - 1 :].argmax(-1).tolist()
        )  # the model's choice for each draft, and then its new drafts
        num_forwards += 1
        checked = drafts if num_verified is None else drafts[:num_verified]
        num_accepted = count_common_prefix(checked, best)
        if num_accepted == len(checked):
            text += [*drafts, best[len(drafts)]]
            drafts = best[len(drafts) + 1 :]
        else:
            text += best[: num_accepted + 1]
            drafts = []
        if len(text) >= length or {*ENDS} & {*text}:
            return cut(text[:length], ENDS), num_forwards


def count_common_prefix(drafts: list[int], best: list[int]) -> int:
    """Return how many drafts, up to the first wrong one, are what the model chooses."""
    return next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))


def choose(scores: Tensor, threshold: float | None) -> list[int]:
    """Return the masks whose token is at least as probable as the threshold, or else the best mask."""
    best = scores.exp().max(-1).values.tolist()
    if threshold is not None and max(best) >= threshold:
        return [i for i, value in enumerate(best) if value >= threshold]
    return [best.index(max(best))]


def is_complete(text: list[int], length: int) -> bool:
    """Return whether the response is known up to its length or its first EOS."""
    known = text[:length]
    known = known[: known.index(MASK)] if MASK in known else known
    return bool({*ENDS} & {*known}) or len(known) == length


def fill_blocks(
    model: Backbone, prompt: Text, length: int, *, size: int, threshold: float | None, causal: bool, budget: int | None
) -> Run:
    """Fill blocks of masks after the text; a forward pass reads each full block again, for the next block.

    Args:
        model: The model.
        prompt: The prompt.
        length: Maximum number of new tokens.
        size: Size of a block.
        threshold: Probability from which all masks are filled; otherwise the surest mask is filled.
        causal: Whether the text before a block is causal; otherwise tokens see their whole block.
        budget: Maximum number of tokens before the end of thinking, which is then written.
    """
    text: list[int] = []
    num_forwards = 0
    while not is_complete(text, length):
        start = len(text)
        known = [*prompt, *text]
        segments = None if causal else [0] * len(prompt) + [1 + place // size for place in range(start)]
        block = [MASK] * size
        num_forwards += 1  # reads the prompt, or the block before
        if causal:
            block[0] = int(read(model, known, [])[-1].argmax())
        if budget is not None and start + size > budget and THINK_END not in text:
            block[max(budget - start, 0)] = THINK_END
        while not is_complete([*text, *block], length) and MASK in block:
            masks = [i for i, token in enumerate(block) if token == MASK]
            scores = read(model, known, block, segments)[len(known) :][masks]
            num_forwards += 1
            for i in choose(scores, threshold):
                block[masks[i]] = int(scores[i].argmax())
        text += block
    return cut(text[:length], ENDS), num_forwards


def speculate(model: Backbone, prompt: Text, length: int, *, size: int, threshold: float, budget: int | None) -> Run:
    """Draft a block whose tokens see each other, and verify the block with causal attention."""
    text = [int(read(model, [*prompt], [])[-1].argmax())]
    num_forwards = 1
    while not is_complete(text, length):
        context, block = [*prompt, *text[:-1]], [text[-1], *[MASK] * (size - 1)]
        while MASK in block:
            masks = [i for i, token in enumerate(block) if token == MASK]
            scores = read(model, context, block)[len(context) :][masks]
            num_forwards += 1
            for i in choose(scores, threshold) if threshold else range(len(masks)):
                block[masks[i]] = int(scores[i].argmax())
        best = read(model, [*context, *block], [])[len(context) :].argmax(-1).tolist()
        num_forwards += 1
        num_accepted = count_common_prefix(block[1:], best)
        new = cut(best[: num_accepted + 1], ENDS)
        if budget is not None and len(text) + len(new) > budget and not {THINK_END, *ENDS} & {*text, *new}:
            new[-1] = THINK_END
        text += new
    return cut(text[:length], ENDS), num_forwards


@settings(max_examples=examples(120), deadline=None)
@given(
    model=MODELS, prompts=TEXTS, length=st.integers(1, 18), size=st.integers(1, 7),
    num_verified=st.one_of(st.none(), st.integers(0, 7)),
)  # fmt: skip
@torch.no_grad()
def test_introspective_strides_equal_the_slow_program(
    model: Backbone, prompts: list[Text], length: int, size: int, num_verified: int | None
) -> None:
    decoder = IntrospectiveStrided(stride=size, num_verified=num_verified)
    expected = [decode_in_strides(model, prompt, length, size=size, num_verified=num_verified) for prompt in prompts]
    assert run(model, decoder, prompts, length) == expected


def make_budget_options(budget: int | None) -> dict[str, Any]:
    """Return the decoder's options for a budget of thinking tokens."""
    return {} if budget is None else {"max_thinking_tokens": budget, "end_think_token_id": THINK_END}


@settings(max_examples=examples(120), deadline=None)
@given(
    model=MODELS, prompts=TEXTS, length=st.integers(1, 18), size=st.integers(1, 7),
    threshold=st.one_of(st.none(), THRESHOLDS), causal=st.booleans(), budget=BUDGETS,
)  # fmt: skip
@torch.no_grad()
def test_causal_block_diffusion_equals_the_slow_program(
    model: Backbone, prompts: list[Text], length: int, size: int, threshold: float | None, causal: bool,
    budget: int | None,
) -> None:  # fmt: skip
    rule = {"threshold": threshold, "size": size, "causal": causal, "budget": budget}
    decoder = CausalBlockDiffusion(
        block_size=size, threshold=threshold, causal_context=causal, **make_budget_options(budget)
    )
    expected = [fill_blocks(model, prompt, length, **rule) for prompt in prompts]
    assert run(model, decoder, prompts, length) == expected


@settings(max_examples=examples(120), deadline=None)
@given(
    model=MODELS, prompts=TEXTS, length=st.integers(1, 18), size=st.integers(1, 7),
    threshold=st.one_of(st.just(0.0), THRESHOLDS), budget=BUDGETS,
)  # fmt: skip
@torch.no_grad()
def test_linear_speculation_equals_the_slow_program(
    model: Backbone, prompts: list[Text], length: int, size: int, threshold: float, budget: int | None
) -> None:
    decoder = LinearSpeculation(block_size=size, threshold=threshold, **make_budget_options(budget))
    expected = [speculate(model, prompt, length, size=size, threshold=threshold, budget=budget) for prompt in prompts]
    assert run(model, decoder, prompts, length) == expected
