"""Packing: the same corruption and the same loss in fewer, fuller rows, and no sample sees another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from refusion_lit.contrib import SoftTail
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.packing import lay_out, pack
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive, BlockMasked, DualStream, Hybrid, Masked, MaskWindows, Objective
from refusion_lit.types import ModelTraits, SpecialTokens
from support.attention_masks import attention_mask
from support.tiny import TINY_QWEN

PAD, EOS, MASK, VOCAB = 0, 1, 2, 60
SPECIAL = SpecialTokens(mask_token_id=MASK, eos_token_ids=(EOS,), pad_token_id=PAD, vocab_size=VOCAB)
OBJECTIVES: list[Objective] = [
    Hybrid(slot_sizes=(1, 3, 4)),
    Autoregressive(),
    Masked(),
    Masked(shifted=True, cart_p=0.3, pad_responses_to=4),
    BlockMasked(block_size=4),
    BlockMasked(block_size=3, complementary=True, shifted=True, fill_blocks_with="mask"),
    DualStream(block_size=4),
    SoftTail(),
    MaskWindows(window=3),
]
each_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
SAMPLES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=6)


def make_batch(samples: list[tuple[int, int, int]]) -> tuple[ResponseBatch, torch.Tensor]:
    """Return a batch of (prompt length, response length, row) and the rows, numbered without gaps."""
    numbers = {row: number for number, row in enumerate(sorted({row for _, _, row in samples}))}
    prompts, responses, rows = torch.tensor([(p, r, numbers[row]) for p, r, row in samples]).unbind(1)
    places = torch.arange(int((prompts + responses).max()))
    tokens = torch.randint(3, VOCAB, (len(samples), len(places)), generator=torch.Generator().manual_seed(len(samples)))
    tokens = tokens.masked_fill(places >= (prompts + responses)[:, None], PAD)
    keys = torch.arange(len(samples)) * 1_000_003
    batch = ResponseBatch(input_ids=tokens, prompt_lengths=prompts, response_lengths=responses, sample_keys=keys)
    return batch, rows


def corrupt(objective: Objective, batch: ResponseBatch) -> CorruptedBatch:
    return objective.corrupt(batch, KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0), SPECIAL)


@pytest.fixture(scope="module")
def make_backbone() -> Callable[[str], Backbone]:
    """Return a maker of a small model with a given attention implementation, the same weights each time."""

    def make(implementation: str = "sdpa") -> Backbone:
        config = AutoConfig.for_model(**TINY_QWEN | {"num_hidden_layers": 2, "vocab_size": VOCAB})
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float64)
        return Backbone(model, ModelTraits(), SPECIAL)

    return make


def loss_and_gradients(
    backbone: Backbone, objective: Objective, corrupted: CorruptedBatch
) -> tuple[LossOutput, list[torch.Tensor]]:
    hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    loss = objective.loss(hidden, backbone.logits, corrupted)
    return loss, list(torch.autograd.grad(loss.total, list(backbone.parameters())))


@each_objective
@settings(max_examples=10, deadline=None)
@given(samples=SAMPLES)
def test_loss_and_gradients_are_those_without_packing(
    make_backbone: Callable[..., Backbone], objective: Objective, samples: list[tuple[int, int, int]]
) -> None:
    backbone = make_backbone()
    batch, rows = make_batch(samples)
    plain = corrupt(objective, batch)
    packed = pack(plain, rows, pad_token_id=PAD)
    expected, expected_gradients = loss_and_gradients(backbone, objective, plain)
    actual, gradients = loss_and_gradients(backbone, objective, packed)
    torch.testing.assert_close(actual.sums, expected.sums, rtol=1e-9, atol=1e-9)
    assert torch.equal(actual.counts, expected.counts)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-7, atol=1e-9)


def count_needed_positions(labels: torch.Tensor, mask: torch.Tensor) -> int:
    """Return the number of a row's positions that have a label, or are seen from such a position through any others."""
    found: set[int] = set()
    waiting = labels.ne(IGNORE_INDEX).nonzero()[:, 0].tolist() or [0]  # no row may be empty
    while waiting:
        position = waiting.pop()
        if position not in found:
            found.add(position)
            waiting += mask[position].nonzero()[:, 0].tolist()
    return len(found)


@each_objective
@settings(max_examples=10, deadline=None)
@given(samples=SAMPLES)
def test_dropped_positions_change_neither_loss_nor_gradients(
    make_backbone: Callable[..., Backbone], objective: Objective, samples: list[tuple[int, int, int]]
) -> None:
    """The number of positions that remain is compared with a loop over what labelled positions see."""
    batch, rows = make_batch(samples)
    plain = corrupt(objective, batch)
    if plain.visible is None:
        return
    dropped, packed = (lay_out(plain, places, pad_token_id=PAD) for places in (None, rows))
    expected, expected_gradients = loss_and_gradients(make_backbone(), objective, plain)
    for shorter in (dropped, packed):
        actual, gradients = loss_and_gradients(make_backbone(), objective, shorter)
        torch.testing.assert_close(actual.sums, expected.sums, rtol=1e-9, atol=1e-9)
        assert torch.equal(actual.counts, expected.counts)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-7, atol=1e-9)
    mask = attention_mask(plain)
    widths = [count_needed_positions(labels, row_mask) for labels, row_mask in zip(plain.labels, mask, strict=True)]
    assert dropped.input_ids.shape[1] == max(widths)
    sums = torch.tensor(widths).view(plain.num_views, -1) @ torch.nn.functional.one_hot(rows)
    assert packed.input_ids.shape[1] == sums.max()


def chain() -> CorruptedBatch:
    """Return a row whose labelled last position sees position 1, which sees position 0."""
    visible = torch.tensor([[[0, 1], [0, 2], [0, 3], [1, 2]]])[:, :, None]
    return CorruptedBatch(
        input_ids=torch.tensor([[5, 6, 7, 8]]),
        position_ids=torch.arange(4)[None],
        labels=torch.tensor([[IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 9]]),
        weights=torch.ones(1, 4),
        terms=torch.zeros(1, 4, dtype=torch.long),
        counts=torch.ones(1),
        visible=visible,
        is_real=torch.ones(1, 4, dtype=torch.bool),
    )


def test_a_position_that_is_seen_through_another_stays() -> None:
    dropped = lay_out(chain(), None, pad_token_id=PAD)
    assert (dropped.input_ids.tolist(), dropped.labels.tolist()) == ([[5, 6, 8]], [[IGNORE_INDEX, IGNORE_INDEX, 9]])
    assert attention_mask(dropped)[0].tolist() == [[True, False, False], [True, True, False], [False, True, False]]


@pytest.mark.parametrize(
    "field",
    [{"rejected": torch.zeros(1, 4, dtype=torch.long)}, {"num_drafts": 1}, {"num_canvas": 1}, {"is_real": None}],
)
def test_batches_that_cannot_be_packed_stay_as_they_are(field: dict[str, Any]) -> None:
    batch = replace(chain(), **field)
    assert lay_out(batch, None, pad_token_id=PAD) is batch


@torch.no_grad()
def loss_sums(backbone: Backbone, objective: Objective, corrupted: CorruptedBatch) -> torch.Tensor:
    hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    return objective.loss(hidden, backbone.head, corrupted).sums


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_packs_alike(make_backbone: Callable[..., Backbone]) -> None:
    batch, rows = make_batch([(2, 7, 0), (3, 4, 1), (0, 5, 1), (4, 9, 0)])
    torch.compiler.set_stance("force_eager")  # compiling flex attention takes 20 s on a CPU
    try:
        for objective in OBJECTIVES:
            plain = corrupt(objective, batch)
            packed = pack(plain, rows, pad_token_id=PAD)
            expected = loss_sums(make_backbone("sdpa").float(), objective, plain)
            actual = loss_sums(make_backbone("flex_attention").float(), objective, packed)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    finally:
        torch.compiler.set_stance("default")


def join_masks(plain: CorruptedBatch, members: list[int], places: list[torch.Tensor], width: int) -> torch.Tensor:
    """Return the mask of a row that holds samples one after the other, each of which sees what it sees alone.

    Args:
        plain: The samples, one a row.
        members: Rows of the samples.
        places: Where the samples' tokens are, without padding.
        width: Length of the row; padding sees itself.
    """
    joined = torch.eye(width, dtype=torch.bool)
    mask = attention_mask(plain)
    start = 0
    for member, place in zip(members, places, strict=True):
        stop = start + len(place)
        is_causal = mask is None
        joined[start:stop, start:stop] = (
            torch.ones(len(place), len(place)).tril().bool() if is_causal else mask[member][place][:, place]
        )
        start = stop
    return joined


@each_objective
@settings(max_examples=15, deadline=None)
@given(samples=SAMPLES)
def test_rows_hold_their_samples_unchanged_and_apart(objective: Objective, samples: list[tuple[int, int, int]]) -> None:
    """Compared with a loop that puts one sample's positions after the other's."""
    batch, rows = make_batch(samples)
    plain = corrupt(objective, batch)
    packed = pack(plain, rows, pad_token_id=PAD)
    num_rows, num_views = int(rows.max()) + 1, len(plain.input_ids) // len(rows)
    assert plain.is_real is not None
    assert attention_mask(packed) is not None
    assert len(packed.input_ids) == num_rows * num_views
    width = packed.input_ids.shape[1]
    for view in range(num_views):
        for row in range(num_rows):
            members = [view * len(rows) + i for i in range(len(rows)) if rows[i] == row]
            places = [plain.is_real[member].nonzero()[:, 0] for member in members]
            number = view * num_rows + row
            for name in ("input_ids", "position_ids", "labels", "weights", "terms", "is_masked"):
                actual = getattr(packed, name)[number]
                expected = torch.cat([getattr(plain, name)[m, p] for m, p in zip(members, places, strict=True)])
                assert torch.equal(actual[: len(expected)], expected), name
            assert torch.equal(attention_mask(packed)[number], join_masks(plain, members, places, width))
            assert packed.is_real is not None
            length = sum(len(place) for place in places)
            assert packed.is_real[number].tolist() == [True] * length + [False] * (width - length)
            assert (packed.labels[number, length:] == IGNORE_INDEX).all()
            assert (packed.input_ids[number, length:] == PAD).all()
    widest = max(int(packed.is_real[number].sum()) for number in range(len(packed.input_ids)))
    assert width == widest


def test_an_objective_that_does_not_say_what_is_real_is_refused() -> None:
    batch, rows = make_batch([(1, 3, 0)])
    silent = replace(corrupt(Autoregressive(), batch), is_real=None)
    message = r"data\.pack_length: expected an objective that supports packing, got one that"
    with pytest.raises(ValueError, match=message):
        pack(silent, rows, pad_token_id=PAD)
