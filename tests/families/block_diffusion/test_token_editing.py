"""Token editing against a slow loop without a cache, and on a text that changes its mind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import BlockDiffusion, ModelMismatchError, TokenEditing, decode
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import as_mask
from refusion_lit.types import ModelTraits, Prediction, Prompt, SamplingParams
from support.decoder_cases import fill_until_accepted, traits_for
from support.example_counts import examples
from support.fakes import MASK, SPECIAL, VOCAB, FakeModel, HashModel, tiny_backbone
from support.loop_cases import LoopCase, loop_cases
from support.slow_decoding import best_allowed, cut


def slow_editing(
    model: LanguageModel,
    prompt: tuple[int, ...],
    decoder: TokenEditing,
    length: int,
    known: Sequence[int | None] = (),
) -> tuple[list[int], int]:
    """Fill and edit block by block, but what is known of the response; every forward feeds the whole text."""
    size, text, num_forwards = decoder.block_size, list(prompt), 0
    special, length = model.special_tokens, length + sum(token is not None for token in known)
    holes_end = len(known) if None in known else 0
    while True:
        start = len(text) - len(prompt)
        num_left = size - len(text) % size
        block: list[int | None] = [*known[start:], *[None] * num_left][:num_left]
        fixed = [token is not None for token in block]
        num_post = 0
        while not all(fixed) and num_post < decoder.max_post_steps:
            best, sure = read_block(model, text, block, size, holes_end - start)
            num_forwards += 1
            masked = [i for i, token in enumerate(block) if token is None]
            filled = [i for i in masked if sure[i] > decoder.mask_threshold]
            filled = filled or sorted(masked, key=lambda i: (-sure[i], i))[:1]
            edited = [
                i for i, token in enumerate(block)
                if token not in (None, best[i]) and sure[i] > decoder.edit_threshold and not fixed[i]
            ]  # fmt: skip
            for i in [*filled, *edited]:
                block[i] = best[i]
            num_post += not masked
            if not masked and not edited:
                break
        text += [token for token in block if token is not None]
        response = text[len(prompt) :][:length]
        if set(special.eos_token_ids) & set(response) or len(response) == length:
            return cut(response, special.eos_token_ids), num_forwards


def read_block(
    model: LanguageModel, text: list[int], block: list[int | None], block_size: int, num_without_eos: int
) -> tuple[list[int], list[float]]:
    """Return the most probable token at each place of a block, and its probability.

    Args:
        model: The model.
        text: The tokens before the block.
        block: Its tokens; ``None``: masks.
        block_size: Size of a block; the first may be shorter.
        num_without_eos: Number of places, from the left, at which no EOS token may be drawn.
    """
    special = model.special_tokens
    ids = [*text, *(MASK if token is None else token for token in block)]
    blocks = torch.arange(len(ids)) // block_size
    visible = (blocks[:, None] >= blocks)[None]
    hidden = model.hidden_states(torch.tensor([ids]), torch.arange(len(ids))[None], visible)
    logits = model.logits(hidden[0]).double()[len(text) :]
    best = []
    for place, scores in enumerate(logits):
        banned = [*special.banned_token_ids, *(special.eos_token_ids if place < num_without_eos else ())]
        best.append(best_allowed(scores, banned, special.vocab_size))
    return best, logits.softmax(-1).gather(-1, torch.tensor(best)[:, None])[:, 0].tolist()


@settings(max_examples=examples(42), deadline=None)
@given(
    case=loop_cases(),
    block_size=st.integers(1, 7),
    mask_threshold=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    edit_threshold=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
)
def test_the_text_is_that_of_a_loop_without_cache(
    case: LoopCase, block_size: int, mask_threshold: float, edit_threshold: float
) -> None:
    decoder = TokenEditing(block_size=block_size, mask_threshold=mask_threshold, edit_threshold=edit_threshold)
    case.check(decoder, slow_editing)


@settings(max_examples=examples(24), deadline=None)
@given(
    seed=st.integers(0, 9999), prompt=st.lists(st.integers(3, 8), min_size=1, max_size=5),
    known=st.lists(st.none() | st.integers(3, 8), max_size=14).map(lambda tokens: (*tokens, 4)),
    block_size=st.integers(1, 5), threshold=st.sampled_from([0.0, 0.1, 0.3]), length=st.integers(14, 17),
)  # fmt: skip
def test_what_is_given_is_read_and_never_replaced(
    seed: int, prompt: list[int], known: tuple[int | None, ...], block_size: int, threshold: float, length: int
) -> None:
    decoder = TokenEditing(block_size=block_size, mask_threshold=0.3, edit_threshold=threshold)
    model, slow = (HashModel(seed, end_bias=2.0, traits=traits_for(decoder)) for _ in range(2))
    request = fill_until_accepted(decoder, Prompt(token_ids=tuple(prompt), id="p", given=known))
    [row] = decode(model, decoder, [request], SamplingParams(max_new_tokens=length)).rows
    assert (row.token_ids, row.num_forwards) == slow_editing(slow, tuple(prompt), decoder, length, request.given)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_without_edits_it_is_block_diffusion_and_a_forward_more_for_each_block(threshold: float) -> None:
    traits = ModelTraits(attention="block_causal", block_size=4, predictions=("mask", "visible"))
    model = tiny_backbone(traits, replace(SPECIAL, eos_token_ids=(VOCAB + 2,)))
    requests = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (4, 8)]
    decoders = (
        TokenEditing(block_size=4, mask_threshold=threshold, edit_threshold=1.0),
        BlockDiffusion(block_size=4, threshold=threshold),
    )
    sampling = SamplingParams(max_new_tokens=20)
    edited_rows, plain_rows = (decode(model, decoder, requests, sampling, batch_size=2).rows for decoder in decoders)
    for edited, plain in zip(edited_rows, plain_rows, strict=True):
        assert (edited.token_ids, edited.num_forwards) == (plain.token_ids, plain.num_forwards + 20 // 4)


class Regrets(FakeModel):
    """Wants token 5 everywhere; once its right neighbour is known, position 4 wants 6 or, ``cycles``, 5 and 6 in turn.

    Hidden states are the wanted tokens themselves.
    """

    def __init__(self, *, cycles: bool) -> None:
        super().__init__(ModelTraits(attention="block_causal", block_size=4, predictions=("mask", "visible")))
        self.cycles = cycles

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attention_mask, cache=None) -> Tensor:
        mask = as_mask(attention_mask, self.device)
        self.record(input_ids, position_ids, mask, torch.ones_like(input_ids, dtype=torch.bool))
        wanted = torch.full_like(input_ids, 5)
        for row, (ids, places) in enumerate(zip(input_ids.tolist(), position_ids.tolist(), strict=True)):
            known = dict(zip(places, ids, strict=True))
            if 5 in known and known[5] != MASK and known.get(4) != MASK and 4 in known:
                wanted[row, places.index(4)] = 6 if not self.cycles or known[4] == 5 else 5
        return wanted[..., None].double()

    def logits(self, hidden: Tensor) -> Tensor:
        ids = hidden[:, 0].long()
        logits = torch.zeros(len(ids), self.num_head_rows, dtype=torch.float64)
        return logits.scatter(1, ids[:, None], 9.0)

    def make_cache(self, num_rows: int) -> KVCache:
        return KVCache(0, num_rows)  # no layers: it keeps no state


@pytest.mark.parametrize(("cycles", "expected", "num_forwards"), [(False, [6, 5, 5, 5], 3), (True, [5, 5, 5, 5], 17)])
def test_a_token_is_replaced_once_its_neighbour_is_known(cycles: bool, expected: list[int], num_forwards: int) -> None:
    """All masks are filled; then position 4 changes its mind.

    That happens once, before a forward that changes nothing, or until the bound of 16 forwards without masks.
    """
    decoder = TokenEditing(block_size=4, mask_threshold=0.5, edit_threshold=0.5)
    prompt, sampling = Prompt(token_ids=(3, 4, 7, 8), id="p"), SamplingParams(max_new_tokens=4)
    [row] = decode(Regrets(cycles=cycles), decoder, [prompt], sampling).rows
    assert (row.token_ids, row.num_forwards) == (expected, num_forwards)


def test_a_given_token_stays_though_the_model_wants_another() -> None:
    decoder = TokenEditing(block_size=4, mask_threshold=0.5, edit_threshold=0.5)
    prompt, sampling = Prompt(token_ids=(3, 4, 7, 8), id="p", given=(7, None, 7)), SamplingParams(max_new_tokens=2)
    model = Regrets(cycles=False)  # wants 6 at place 0 and 5 at place 2, with certainty
    [row] = decode(model, decoder, [prompt], sampling).rows
    # One forward fills both masks, the second replaces nothing.
    assert (row.token_ids, row.num_forwards) == ([7, 5, 7, 5], 2)
    assert decoder.refusal(replace(prompt, given=(None, 7, None, 7))) is None
    assert decoder.refusal(replace(prompt, given=(None, 7, 7, 7, 7))) is not None


def test_a_model_that_never_saw_wrong_tokens_is_refused() -> None:
    traits = ModelTraits(attention="block_causal", block_size=32, predictions=("mask",))
    [reason] = TokenEditing().requirements().mismatches(traits)
    assert "visible" in reason


@pytest.mark.parametrize(
    ("trained", "expected"), [(("mask", "visible"), "block_size to 4"), (("mask",), "allow_mismatch")]
)
def test_a_block_size_that_alone_does_not_fit_is_named(trained: tuple[Prediction, ...], expected: str) -> None:
    traits = ModelTraits(attention="block_causal", block_size=4, predictions=trained)
    prompt = Prompt(token_ids=(3, 4), id="p")
    with pytest.raises(ModelMismatchError, match=expected):
        decode(HashModel(traits=traits), TokenEditing(block_size=8), [prompt], SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    "options",
    [{"block_size": 0}, {"mask_threshold": 1.5}, {"edit_threshold": -0.1}],
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TokenEditing(**options)  # type: ignore[arg-type]
