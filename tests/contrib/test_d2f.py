"""D2F against a slow loop without a cache, and against block diffusion."""

from __future__ import annotations

from collections.abc import Sequence

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
    size, num_forwards, start = decoder.block_size, 0, len(prompt)
    length += sum(token is not None for token in known)
    holes_end = start + len(known) if None in known else 0
    first = start
    special, eos = model.special_tokens, model.special_tokens.eos_token_ids
    whole = [*prompt, *known, *[None] * (size + length)]
    text: list[int | None] = whole[: first + size]
    goal = start + length
    while True:
        # Open a block if there is room and enough of the last block is filled; a block that is known opens the next.
        while True:
            blocks = [range(stop - size, stop) for stop in range(first + size, len(text) + 1, size)]
            share = [1.0, *(sum(text[p] is not None for p in block) / size for block in blocks)]
            num_open = len(blocks) - next((i for i, value in enumerate(share[1:]) if value < 1), len(blocks))
            has_room = len(text) < goal and (decoder.num_open_blocks is None or num_open < decoder.num_open_blocks)
            has_room = has_room and (num_forwards > 0 or num_open == 0)
            if not has_room or share[-1] < decoder.add_threshold or set(text[start:]) & set(eos):
                break
            text += whole[len(text) : len(text) + size]
            if None in text[-size:]:
                blocks.append(range(len(text) - size, len(text)))
                share.append(sum(token is not None for token in text[-size:]) / size)
                break
        # Tokens see their block and the blocks before; the prompt counts as block -1.
        row = [MASK if token is None else token for token in text]
        numbers = torch.tensor([-1 if p < first else (p - first) // size for p in range(len(row))])
        visible = (numbers[:, None] >= numbers)[None]
        hidden = model.hidden_states(torch.tensor([row]), torch.arange(len(row))[None], visible)
        logits = model.logits(hidden[0]).double()
        num_forwards += 1
        # In each block fill the sure masks; an activated block without a sure mask fills its surest.
        for i, block in enumerate(blocks):
            masked = [p for p in block if text[p] is None]
            drafts = {}
            for p in masked:
                scores = logits[p]
                banned = [*special.banned_token_ids, *(eos if p < holes_end else ())]
                token = best_allowed(scores, banned, special.vocab_size)
                drafts[p] = (float(scores.softmax(-1)[token]), token)
            chosen = [p for p in masked if drafts[p][0] > decoder.threshold]
            if masked and not chosen and share[i] >= decoder.activate_threshold:
                chosen = [max(masked, key=lambda p: (drafts[p][0], -p))]
            for p in chosen:
                text[p] = drafts[p][1]
        response = text[start : text.index(None) if None in text else goal][:length]
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
