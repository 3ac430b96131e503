"""D2F against a slow loop without a cache, and against block diffusion."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib import D2F
from refusion_lit.decoding import decode
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import fill_until_accepted, traits_for
from support.example_counts import examples
from support.fakes import MASK, HashModel, tiny_backbone
from support.loop_cases import LoopCase, loop_cases
from support.slow_decoding import best_allowed, cut


def choose(drafts: dict[int, tuple[float, int]], threshold: float, *, is_ready: bool) -> list[int]:
    """Return the positions of a block's sure drafts; if there are none and the block is ready, of the surest.

    ``drafts`` has probability and token by position.
    """
    sure = [p for p, (probability, _) in drafts.items() if probability > threshold]
    if drafts and is_ready and not sure:
        return [max(drafts, key=lambda p: (drafts[p][0], -p))]
    return sure


def slow_d2f(
    model: LanguageModel, prompt: tuple[int, ...], decoder: D2F, length: int, known: Sequence[int | None] = ()
) -> tuple[list[int], int]:
    """Decode a pipeline of blocks; every forward pass feeds the whole text and all open blocks.

    Args:
        model: The model.
        prompt: The prompt.
        decoder: The decoder's options.
        length: Number of tokens to generate, beside the known tokens.
        known: Tokens at the beginning of the response that a template gives; ``None`` for a hole.

    Returns:
        The response and the number of forward passes.
    """
    special, eos = model.special_tokens, model.special_tokens.eos_token_ids
    size, start = decoder.block_size, len(prompt)
    length += sum(token is not None for token in known)
    end = start + length
    holes_end = start + len(known) if None in known else 0
    whole = [*prompt, *known, *[None] * (size + length)]
    text: list[int | None] = whole[: start + size]
    blocks = [range(start, start + size)]
    num_forwards = 0

    def share(block: range) -> float:
        """Return the share of a block's tokens that are filled."""
        return sum(text[p] is not None for p in block) / size

    def may_open_block() -> bool:
        """Return whether there is room for another block, and enough of the last block is filled."""
        num_open = len([*dropwhile(lambda block: share(block) == 1, blocks)])
        if len(text) >= end or set(text[start:]) & set(eos) or share(blocks[-1]) < decoder.add_threshold:
            return False
        limit = 1 if num_forwards == 0 else decoder.num_open_blocks
        return limit is None or num_open < limit

    while True:
        while may_open_block():
            blocks.append(range(len(text), len(text) + size))
            text += whole[blocks[-1].start : blocks[-1].stop]
            if None in text[-size:]:
                break  # a forward pass opens one block, and any number of blocks that are known
        # Tokens see their block and the blocks before; the prompt counts as block -1.
        row = [MASK if token is None else token for token in text]
        numbers = torch.tensor([-1 if p < start else (p - start) // size for p in range(len(row))])
        visible = (numbers[:, None] >= numbers)[None]
        hidden = model.hidden_states(torch.tensor([row]), torch.arange(len(row))[None], visible)
        logits = model.logits(hidden[0]).double()
        num_forwards += 1
        # A block is ready if enough of the block before it is filled.
        shares_before = [1.0, *map(share, blocks[:-1])]
        for share_before, block in zip(shares_before, blocks, strict=True):
            drafts = {}
            for p in block:
                if text[p] is None:
                    banned = [*special.banned_token_ids, *(eos if p < holes_end else ())]
                    token = best_allowed(logits[p], banned, special.vocab_size)
                    drafts[p] = (float(logits[p].softmax(-1)[token]), token)
            for p in choose(drafts, decoder.threshold, is_ready=share_before >= decoder.activate_threshold):
                text[p] = drafts[p][1]
        response = text[start : text.index(None) if None in text else end][:length]
        if set(eos) & set(response) or len(response) == length:
            return cut([token for token in response if token is not None], eos), num_forwards


@settings(max_examples=examples(42), deadline=None)
@given(
    case=loop_cases(),
    block_size=st.integers(1, 7),
    threshold=st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0]),
    add=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    activate=st.sampled_from([0.0, 0.5, 0.95]),
    num_open_blocks=st.none() | st.integers(1, 3),
)
def test_text_and_forward_passes_equal_a_loop_without_a_cache(
    case: LoopCase, block_size: int, threshold: float, add: float, activate: float, num_open_blocks: int | None
) -> None:
    decoder = D2F(
        block_size=block_size, threshold=threshold, add_threshold=add, activate_threshold=activate,
        num_open_blocks=num_open_blocks,
    )  # fmt: skip
    case.check(decoder, slow_d2f)


@settings(max_examples=examples(32), deadline=None)
@given(
    seed=st.integers(0, 9999), prompt=st.lists(st.integers(3, 8), min_size=1, max_size=5),
    known=st.lists(st.none() | st.integers(3, 8), max_size=14).map(lambda tokens: (*tokens, 4)),
    block_size=st.integers(1, 5), add=st.sampled_from([0.0, 0.1, 0.5, 1.0]), length=st.integers(14, 17),
    num_open_blocks=st.none() | st.integers(1, 3),
)  # fmt: skip
def test_templates_equal_a_loop_without_a_cache(
    seed: int,
    prompt: list[int],
    known: tuple[int | None, ...],
    block_size: int,
    add: float,
    length: int,
    num_open_blocks: int | None,
) -> None:
    decoder = D2F(
        block_size=block_size, threshold=0.1, add_threshold=add, num_open_blocks=num_open_blocks,
    )  # fmt: skip
    model, slow = (HashModel(seed, end_bias=2.0, traits=traits_for(decoder)) for _ in range(2))
    request = fill_until_accepted(decoder, Prompt(token_ids=tuple(prompt), id="p", given=known))
    [row] = decode(model, decoder, [request], SamplingParams(max_new_tokens=length)).rows
    assert (row.token_ids, row.num_forwards) == slow_d2f(slow, tuple(prompt), decoder, length, request.given)


def test_a_block_that_a_template_gives_takes_no_forward_pass() -> None:
    """Blocks are counted from the beginning of the response, as in training, whatever the template gives."""
    decoder = D2F(block_size=4, threshold=0.0)
    model = HashModel(0, ends=frozenset(), end_bias=-99.0, traits=traits_for(decoder))
    prompt = Prompt(token_ids=(5, 6, 7), id="0", given=(3, 4, 3, 4, None, None, 3, 4))
    row = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=4)).rows[0]
    # First the prompt, the given block and the next block. Then that block again, to store it, and the block after it.
    assert row.forward_shapes == [(1, 11), (1, 8)]
    inside = Prompt(token_ids=(5, 6), id="0", given=(3, None, 3, 4))
    assert decoder.refusal(inside) is None


def test_a_transformer_with_a_cache_writes_what_the_loop_writes() -> None:
    decoder = D2F(block_size=4, threshold=0.5, add_threshold=0.25, activate_threshold=0.75)
    model = tiny_backbone(traits_for(decoder))
    batch = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (1, 5, 8)]
    rows = decode(model, decoder, batch, SamplingParams(max_new_tokens=20), batch_size=3).rows
    with torch.no_grad():
        expected = [slow_d2f(model, prompt.token_ids, decoder, 20) for prompt in batch]
    assert [(row.token_ids, row.num_forwards) for row in rows] == expected


def test_the_forward_pass_of_a_new_block_stores_the_complete_block_before_it() -> None:
    decoder = D2F(block_size=4, threshold=0.0)
    model = HashModel(0, ends=frozenset(), end_bias=-99.0, traits=traits_for(decoder))
    prompt = Prompt(token_ids=(5, 6, 7), id="0")
    row = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=12)).rows[0]
    # The prompt and a block; then twice the complete block and a new one.
    assert row.forward_shapes == [(1, 7), (1, 8), (1, 8)]


@pytest.mark.parametrize(
    "options",
    [{"block_size": 0}, {"threshold": 1.5}, {"add_threshold": -0.1}, {"activate_threshold": 2.0},
     {"num_open_blocks": 0}],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        D2F(**options)  # type: ignore[arg-type]


def test_a_model_with_blocks_from_position_0_is_refused() -> None:
    traits = ModelTraits(attention="block_causal", block_size=4, predictions=("mask",))
    [reason] = D2F(block_size=4).requirements().mismatches(traits)
    assert "response" in reason
