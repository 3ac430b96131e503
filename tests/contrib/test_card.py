"""CARD against a slow loop without a cache, and against plain decoding."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib import CARD, SoftTail
from refusion_lit.decoding import Autoregressive, decode, default_decoder
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.objectives import GatedDraft
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.example_counts import examples
from support.fakes import MASK, HashModel, tiny_backbone
from support.loop_cases import LoopCase, loop_cases
from support.slow_decoding import best_allowed, cut

TRAITS = ModelTraits(predictions=("mask_shifted", "next_token"))


def known_prefix(block: list[int | None]) -> list[int]:
    """Return the tokens before the first mask."""
    return [token for token in takewhile(lambda token: token is not None, block) if token is not None]


def slow_card(model: LanguageModel, prompt: tuple[int, ...], decoder: CARD, length: int) -> tuple[list[int], int]:
    """Fill blocks of masks; every forward pass feeds the whole text and all masks of the block.

    Returns:
        The response and the number of forward passes.
    """
    text, num_forwards = list(prompt), 0
    special, eos = model.special_tokens, model.special_tokens.eos_token_ids
    while len(text) - len(prompt) < length and not set(eos) & set(text[len(prompt) :]):
        size = min(decoder.block_size, length - (len(text) - len(prompt)))
        block: list[int | None] = [None] * size
        num_rounds = 0
        while None in block:
            row = [*text, *(MASK if token is None else token for token in block)]
            causal = torch.ones(1, len(row), len(row), dtype=torch.bool).tril()
            hidden = model.hidden_states(torch.tensor([row]), torch.arange(len(row))[None], causal)
            logits = model.logits(hidden[0])[len(text) - 1 : -1].double()
            probabilities = logits.softmax(-1)
            tokens = [best_allowed(row, special.banned_token_ids, special.vocab_size) for row in logits]
            sure = {place: float(probabilities[place, tokens[place]]) for place in range(size) if block[place] is None}
            num_forwards, num_rounds = num_forwards + 1, num_rounds + 1
            chosen = [place for place in sure if sure[place] > decoder.threshold or num_rounds == decoder.max_rounds]
            for place in chosen or [max(sure, key=lambda place: (sure[place], -place))]:
                block[place] = tokens[place]
            if set(eos) & set(known_prefix(block)):
                break
        text += known_prefix(block)
    return cut(text[len(prompt) :], eos), num_forwards


@settings(max_examples=examples(48), deadline=None)
@given(
    case=loop_cases(),
    block_size=st.integers(1, 7),
    threshold=st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0]),
    max_rounds=st.none() | st.integers(1, 4),
)
def test_text_and_forward_passes_equal_a_loop_without_a_cache(
    case: LoopCase, block_size: int, threshold: float, max_rounds: int | None
) -> None:
    decoder = CARD(block_size=block_size, threshold=threshold, max_rounds=max_rounds)
    case.check(decoder, slow_card)


@pytest.mark.parametrize("decoder", [CARD(block_size=1), CARD(block_size=1, threshold=0.0, max_rounds=1)])
def test_blocks_of_one_token_are_autoregressive_decoding(decoder: CARD) -> None:
    model = tiny_backbone(TRAITS)
    batch = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (1, 4, 7)]
    sampling = SamplingParams(max_new_tokens=20)
    rows = decode(model, decoder, batch, sampling, batch_size=2).rows
    expected_rows = decode(model, Autoregressive(), batch, sampling, batch_size=2).rows
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row.token_ids == expected.token_ids
        assert (row.num_forwards, row.num_positions) == (expected.num_forwards, expected.num_positions)


def test_finished_blocks_are_computed_twice_and_the_block_up_to_its_last_mask() -> None:
    model = HashModel(0, ends=frozenset(), end_bias=-99.0, traits=TRAITS)
    row = decode(
        model, CARD(block_size=4, threshold=0.0, max_rounds=None), [Prompt(token_ids=(5, 6, 7), id="0")],
        SamplingParams(max_new_tokens=12),
    ).rows[0]  # fmt: skip
    # First the prompt and three masks. Then, twice, the finished block of four tokens and three masks.
    assert (row.num_forwards, row.num_positions) == (3, 6 + 7 + 7)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"threshold": 1.5}, {"threshold": -0.1}, {"max_rounds": 0}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CARD(**options)  # type: ignore[arg-type]


def test_it_is_the_decoder_of_the_models_that_soft_tail_trains() -> None:
    assert default_decoder(SoftTail().traits) == CARD()
    assert isinstance(default_decoder(GatedDraft().traits), Autoregressive)
