"""What every objective promises. The tests find all concrete objectives by themselves, and add variants with options.

An objective may return several views of the batch (rows ``(view sample)``, view-major) and several copies of a
sequence in a row. Its labels must agree with ``traits.predictions``, which tells decoders what the logits predict.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, replace
from itertools import filterfalse, product

import jaxtyping
import pytest
import torch
from docs.examples.ending import Ending
from experiments.infilling.objective import Grouped
from experiments.policy_estimators import likelihoods
from experiments.refusion_pays.recorded import RecordedStates
from experiments.refusion_pays.serial import SerialHybrid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit import objectives
from refusion_lit.contrib import rl
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.types import SpecialTokens
from support.attention_masks import attention_mask
from support.example_counts import examples
from support.shadow_device import SHADOW, ShadowDevice
from support.subclasses import concrete_subclasses

PAD, EOS, MASK = 0, 1, 2
DRAFTS = (1000, 1001, 1002)
SPECIAL = SpecialTokens(
    mask_token_id=MASK, eos_token_ids=(EOS,), pad_token_id=PAD, vocab_size=1000, draft_token_ids=DRAFTS
)
FIRST_PROMPT_ID, FIRST_RESPONSE_ID = 10, 200

VARIANTS: list[Objective] = [
    *(cls() for cls in concrete_subclasses(Objective)),
    objectives.Hybrid(slot_sizes=(1, 3), ar_weight=0.5, mdm_weight=2.0, chunk_size=5),
    Grouped(slot_sizes=(1, 2), max_span=3),
    objectives.Zarya(slot_sizes=(1, 3), token_weights="harmonic", shuffle_masked=True, slot_borders=(0.5, 1.0)),
    objectives.Masked(shifted=True, cart_p=0.3),
    objectives.Masked(pad_responses_to=6),
    objectives.BlockMasked(block_size=4, t_min=0.45, t_max=0.95),
    objectives.BlockMasked(block_size=3, complementary=True, shifted=True, fill_blocks_with="mask"),
    objectives.BlockMasked(block_size=1, t_min=1.0, shifted=True),
    objectives.EditableBlockMasked(block_size=5, max_replaced=0.8, kept=0.4),
    objectives.DiffusionForcing(block_size=3),
    objectives.R2FT(min_span=2, max_span=5, max_unit=3, pad_responses_to=4),
    objectives.StaggeredSets(set_size=3, reach=5),
    objectives.StaggeredSets(set_size=40, reach=40, pad_responses_to=6),
    objectives.UniformBlock(canvas_length=4),
    objectives.UniformBlock(canvas_length=7, ar_weight=0.0, self_conditioning=1.0),
    objectives.SoftTail(),
    objectives.SoftTail(tail=1, decay=1.0),
    objectives.DualStream(block_size=5, ar_weight=0.5),
    objectives.DualStream(block_size=1),
    objectives.CausalBlockMasked(block_size=4, mdm_weight=1.0),
    objectives.Introspective(block_size=4, noisy_targets="response", auto_balance=True),
    objectives.GatedDraft(stride=3, decay=0.5),
    objectives.BlockDraft(num_anchors=3, decay=0.5),
    objectives.MaskWindows(window=3, num_tilings=3, decay=0.5),
    RecordedStates(slot_sizes=(3,)),
    Ending(),
    objectives.GroupPolicy(likelihood=rl.LeftToRight(slot_size=3), temperature=0.7, chunk_size=5),
    objectives.GroupPolicy(likelihood=rl.LeftToRight(slot_size=4), unit="sequence", clip_high=0.3),
    objectives.GroupPolicy(likelihood=likelihoods.MaskedBound(), unit="sequence"),
    objectives.GroupPolicy(likelihood=likelihoods.BlockBound(block_size=3), unit="sequence"),
    objectives.GroupPolicy(likelihood=likelihoods.SlotBound(slot_size=3), unit="sequence"),
    objectives.GroupPolicy(likelihood=likelihoods.MeanField(slot_size=3), unit="sequence"),
    objectives.GroupPolicy(likelihood=likelihoods.Rounds(slot_size=4)),
    likelihoods.LinearPolicy(likelihood=likelihoods.MaskedBound()),
]


def special_tokens(objective: Objective) -> SpecialTokens:
    """Return the special tokens of a model with the drafter that an objective trains."""
    return replace(SPECIAL, drafts_block=isinstance(objective, objectives.BlockDraft))


def uses_masks(objective: Objective) -> bool:
    """Return whether an objective replaces text by the mask token; drafters append draft masks instead."""
    return bool({"mask", "mask_shifted", "isolated_mask", "block_mask"} & set(objective.traits.predictions or ()))


def takes_ratios(objective: Objective) -> bool:
    """Return whether a given mask ratio says how much is masked; likelihoods of answers draw their own masks."""
    return uses_masks(objective) and not isinstance(objective, objectives.GroupPolicy)


each_objective = pytest.mark.parametrize("objective", VARIANTS, ids=repr)
each_with_masks = pytest.mark.parametrize("objective", list(filter(uses_masks, VARIANTS)), ids=repr)
each_with_ratios = pytest.mark.parametrize("objective", list(filter(takes_ratios, VARIANTS)), ids=repr)
each_without_masks = pytest.mark.parametrize("objective", list(filterfalse(uses_masks, VARIANTS)), ids=repr)
Sizes = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=5)


def make_batch(sizes: Sizes, padding: int = 0, numbers: Sequence[int] | None = None) -> ResponseBatch:
    """Return a batch whose prompt ids (from 10) and response ids (from 200) are disjoint.

    Every fourth token of a prompt is the mask token, as a user may write it; every response ends with an EOS token.

    Args:
        sizes: Prompt length and response length of each row.
        padding: Number of padding tokens after the longest row.
        numbers: Numbers of the samples, which determine their noise; by default 0, 1, ...
    """
    input_ids = torch.full((len(sizes), max(map(sum, sizes)) + padding), PAD)
    for row, (prompt, response) in enumerate(sizes):
        input_ids[row, :prompt] = FIRST_PROMPT_ID + torch.arange(prompt)
        input_ids[row, :prompt:4] = MASK
        input_ids[row, prompt : prompt + response] = FIRST_RESPONSE_ID + torch.arange(response)
        input_ids[row, prompt + response - 1] = EOS
    prompts, responses = torch.tensor(sizes).unbind(1)
    keys = torch.tensor(list(numbers or range(len(sizes)))) * 1_000_003  # a prime, so keys are no small neighbours
    return ResponseBatch(input_ids=input_ids, prompt_lengths=prompts, response_lengths=responses, sample_keys=keys)


def corrupt(objective: Objective, batch: ResponseBatch, epoch: int = 0, ratio: float | None = None) -> CorruptedBatch:
    """Corrupt a batch with the noise of its samples and the epoch; ``ratio`` is a mask ratio for all samples."""
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=epoch)
    mask_ratio = None if ratio is None else torch.full((len(batch.input_ids),), ratio, dtype=torch.float64)
    return objective.corrupt(batch, noise, special_tokens(objective), mask_ratio=mask_ratio)


def find_rows(corrupted: CorruptedBatch, sample: int, num_samples: int) -> range:
    """Return the rows of a sample, a row for each view."""
    assert len(corrupted.input_ids) % num_samples == 0
    return range(sample, len(corrupted.input_ids), num_samples)


def list_real_entries(corrupted: CorruptedBatch, row: int, length: int) -> list[int]:
    """Return the indices of a row that are not padding; ``length`` is the sample's number of tokens."""
    ids, positions = corrupted.input_ids[row].tolist(), corrupted.position_ids[row].tolist()
    return [i for i, (token, place) in enumerate(zip(ids, positions, strict=True)) if place < length or token != PAD]


def sample_view(corrupted: CorruptedBatch, row: int, length: int) -> dict[str, Tensor]:
    """Return a row's tensors without padding, to compare the row with a row of another batch."""
    kept = torch.tensor(list_real_entries(corrupted, row, length))
    names = ("input_ids", "position_ids", "labels", "weights", "terms", "is_masked")
    view = {name: getattr(corrupted, name)[row, kept] for name in names}
    if attention_mask(corrupted) is not None:
        view["attention_mask"] = attention_mask(corrupted)[row][kept][:, kept]
    return view


def toy_hidden(corrupted: CorruptedBatch, size: int = 6) -> Tensor:
    """Return hidden states of a model without attention: a state depends on its token and position only."""
    generator = torch.Generator().manual_seed(0)
    num_ids = SPECIAL.vocab_size + len(DRAFTS)
    tokens, places = (torch.randn(num_ids, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return tokens[corrupted.input_ids] + places[corrupted.position_ids]


def toy_head(size: int = 6) -> torch.nn.Linear:
    """Return a small head."""
    torch.manual_seed(0)
    return torch.nn.Linear(size, SPECIAL.vocab_size, dtype=torch.float64)


@each_objective
@settings(max_examples=examples(18), deadline=None)
@given(sizes=SIZES, padding=st.integers(0, 3), epoch=st.integers(0, 99), ratio=st.sampled_from([None, 0.3, 1.0]))
def test_shapes_and_values(objective: Objective, sizes: Sizes, padding: int, epoch: int, ratio: float | None) -> None:
    batch = make_batch(sizes, padding)
    corrupted = corrupt(objective, batch, epoch, ratio)
    shape = corrupted.input_ids.shape
    for name in ("position_ids", "labels", "weights", "terms", "is_masked"):
        assert getattr(corrupted, name).shape == shape, name
    assert len(objective.terms) == len(corrupted.counts)
    assert shape[0] == corrupted.num_views * len(sizes)
    assert attention_mask(corrupted) is None or attention_mask(corrupted).shape == (*shape, shape[1])
    assert attention_mask(corrupted) is not None or objective.traits.attention == "causal"

    is_labelled = corrupted.labels != IGNORE_INDEX
    labels, terms = corrupted.labels[is_labelled], corrupted.terms[is_labelled]
    assert ((labels >= 0) & (labels < SPECIAL.vocab_size)).all()
    assert ((terms >= 0) & (terms < len(objective.terms))).all()
    assert corrupted.weights.isfinite().all()
    assert (corrupted.weights >= 0).all()
    assert (corrupted.weights[~is_labelled] == 0).all()
    assert corrupted.counts.isfinite().all()
    for term in range(len(objective.terms)):
        assert corrupted.counts[term] > 0 or not (terms == term).any()


@each_objective
@settings(max_examples=examples(18), deadline=None)
@given(sizes=SIZES, padding=st.integers(0, 3), epoch=st.integers(0, 99), ratio=st.sampled_from([None, 0.3, 1.0]))
def test_prompt_is_untouched_and_text_is_complete(
    objective: Objective, sizes: Sizes, padding: int, epoch: int, ratio: float | None
) -> None:
    batch = make_batch(sizes, padding)
    corrupted = corrupt(objective, batch, epoch, ratio)
    for sample, (prompt, response) in enumerate(sizes):
        text = batch.input_ids[sample, : prompt + response].tolist()
        for row in find_rows(corrupted, sample, len(sizes)):
            check_text(objective, corrupted, row, text, prompt)


def check_text(objective: Objective, corrupted: CorruptedBatch, row: int, text: list[int], prompt: int) -> None:
    """Assert that a row has whole copies of a text, in which tokens of the response alone are masked or replaced.

    Args:
        objective: The objective.
        corrupted: The corrupted batch.
        row: Number of the row.
        text: Tokens of prompt and response.
        prompt: Number of tokens of the prompt.
    """
    assert corrupted.is_masked is not None
    # Draft masks or a canvas follow the text.
    num_text = corrupted.input_ids.shape[1] - corrupted.num_drafts - corrupted.num_canvas
    real = list_real_entries(corrupted, row, len(text))
    appended = [i for i in real if i >= num_text]
    assert corrupted.num_canvas or set(corrupted.input_ids[row, appended].tolist()) <= set(DRAFTS)
    num_copies: Counter[int] = Counter()
    num_unmasked_copies: Counter[int] = Counter()
    for i in real[: len(real) - len(appended)]:
        place, token = int(corrupted.position_ids[row, i]), int(corrupted.input_ids[row, i])
        num_copies[place] += 1
        num_unmasked_copies[place] += not corrupted.is_masked[row, i]
        if corrupted.is_masked[row, i]:
            assert token == MASK
            assert place >= prompt, "the prompt is never masked"
        elif "visible" in (objective.traits.predictions or ()) and place >= prompt:
            right = text[place] if place < len(text) else EOS
            assert right in (token, int(corrupted.labels[row, i])), "a wrong token is to be corrected"
        elif place < len(text):
            assert token == text[place], "what is not masked stays as it was"
        else:
            assert token in (EOS, MASK), "only these lengthen a text"
    assert set(num_copies) == set(range(len(num_copies))), "every place is there"
    assert len(num_copies) >= len(text)
    # Prompt and response are copied as a whole. Some objectives put masks for a part of the response beside the copies.
    for places in (range(prompt), range(prompt, len(num_copies))):
        is_even = any(len({nums[place] for place in places}) <= 1 for nums in (num_copies, num_unmasked_copies))
        assert is_even, "whole copies"


@each_objective
@settings(max_examples=examples(18), deadline=None)
@given(sizes=SIZES, padding=st.integers(0, 3), epoch=st.integers(0, 99), ratio=st.sampled_from([None, 0.3, 1.0]))
def test_labels_say_what_the_traits_say(
    objective: Objective, sizes: Sizes, padding: int, epoch: int, ratio: float | None
) -> None:
    """Decoders read the logits as ``traits.predictions`` says, so training must label the same tokens."""
    batch = make_batch(sizes, padding)
    corrupted = corrupt(objective, batch, epoch, ratio)
    for sample, (prompt, response) in enumerate(sizes):
        text = dict(enumerate(batch.input_ids[sample, : prompt + response].tolist()))
        for row in find_rows(corrupted, sample, len(sizes)):
            if corrupted.num_drafts:
                required, allowed = labels_of_drafts(objective, corrupted, row, text), {}
            else:
                required, allowed = labels_of_text(objective, corrupted, row, text, prompt)
            labelled = {i: label for i, label in enumerate(corrupted.labels[row].tolist()) if label != IGNORE_INDEX}
            assert required.items() <= labelled.items()
            assert labelled.items() <= {**allowed, **required}.items()


def labels_of_drafts(objective: Objective, corrupted: CorruptedBatch, row: int, text: dict[int, int]) -> dict[int, int]:
    """Return the labels of a row of a drafter's batch, by the entry's index. Only draft masks have labels.

    A draft mask predicts the token after its place; in a block of ``BlockDraft``, the token at its place.
    """
    shift = 0 if isinstance(objective, objectives.BlockDraft) else 1
    ids, places = corrupted.input_ids[row].tolist(), corrupted.position_ids[row].tolist()
    targets = {i: places[i] + shift for i, token in enumerate(ids) if token in DRAFTS}
    return {i: text[place] for i, place in targets.items() if shift or place in text}  # a block may exceed the text


def labels_of_text(
    objective: Objective, corrupted: CorruptedBatch, row: int, text: dict[int, int], prompt: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the labels of a row that the objective's traits require, and those that they allow, by the entry's index.

    Args:
        objective: The objective.
        corrupted: The corrupted batch.
        row: Number of the row.
        text: Tokens of prompt and response by place. EOS tokens may follow them.
        prompt: Number of tokens of the prompt.
    """
    assert corrupted.is_masked is not None
    predictions = set(objective.traits.predictions or ())
    assert predictions
    places, is_masked = corrupted.position_ids[row].tolist(), corrupted.is_masked[row].tolist()
    half = len(places) // 2
    # If masks predict their own token and clean tokens predict the next token, a second, clean copy of the text has the
    # labels of next tokens.
    predict_themselves = {"mask", "block_mask"} & predictions and "next_token" in predictions
    first_with_next = half if predict_themselves else 0
    # Clean tokens of a noisy copy need no label if a clean copy beside it has the labels of all next tokens.
    has_copy = {"mask_shifted", "next_token"} <= predictions and places[:half] == places[half:]
    required: dict[int, int] = {}
    allowed: dict[int, int] = {}
    of_clean = [allowed if has_copy and i < half else required for i in range(len(places))]
    for i, (place, masked) in enumerate(zip(places, is_masked, strict=True)):
        here, after = text.get(place, EOS), text.get(place + 1)
        if masked and after is not None and {"mask_shifted", "next_token"} <= predictions:
            allowed[i] = after  # a mask may predict a clean token after it
        if masked and {"mask", "isolated_mask", "block_mask"} & predictions:
            required[i] = here
        elif masked and "mask_shifted" in predictions and i > 0:  # the entry before a mask predicts the mask's token
            assert places[i - 1] == place - 1
            (required if is_masked[i - 1] else of_clean[i - 1])[i - 1] = here
        elif corrupted.num_canvas and i >= len(places) - corrupted.num_canvas:
            assert place >= prompt
            required[i] = here
        elif "visible" in predictions and place >= prompt and not corrupted.num_canvas:
            allowed[i] = here
        elif after is not None and prompt <= place + 1 and "next_token" in predictions and i >= first_with_next:
            of_clean[i][i] = after
        elif after is not None and prompt <= place and "next_token_in_slot" in predictions:
            allowed[i] = after  # unless the token ends its slot
    return required, allowed


@each_objective
@settings(max_examples=examples(10), deadline=None)
@given(
    sizes=SIZES, padding=st.integers(0, 5), epoch=st.integers(0, 99), ratio=st.sampled_from([None, 0.3]), data=st.data()
)
def test_a_sample_is_corrupted_as_if_it_were_alone(
    objective: Objective, sizes: Sizes, padding: int, epoch: int, ratio: float | None, data: st.DataObject
) -> None:
    """The other samples of a batch, their order and the padding do not change how a sample is corrupted."""
    order = data.draw(st.permutations(range(len(sizes))))
    corrupted = corrupt(objective, make_batch([sizes[i] for i in order], padding, order), epoch, ratio)
    for index, number in enumerate(order):
        alone = corrupt(objective, make_batch([sizes[number]], 0, [number]), epoch, ratio)
        length = sum(sizes[number])
        rows, rows_alone = find_rows(corrupted, index, len(sizes)), find_rows(alone, 0, 1)
        for row, row_alone in zip(rows, rows_alone, strict=True):
            in_batch, by_itself = sample_view(corrupted, row, length), sample_view(alone, row_alone, length)
            torch.testing.assert_close(in_batch, by_itself)


@each_objective
@settings(max_examples=examples(10), deadline=None)
@given(sizes=SIZES, padding=st.integers(0, 3), ratio=st.sampled_from([None, 0.3, 1.0]))
def test_micro_batches_add_up_to_the_batch(
    objective: Objective, sizes: Sizes, padding: int, ratio: float | None
) -> None:
    def loss(batch: ResponseBatch) -> LossOutput:
        corrupted = corrupt(objective, batch, ratio=ratio)
        return objective.loss(toy_hidden(corrupted), toy_head(), corrupted)

    whole = loss(make_batch(sizes, padding))
    parts = [loss(make_batch([size], padding, [number])) for number, size in enumerate(sizes)]
    torch.testing.assert_close(sum(part.sums for part in parts), whole.sums, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(sum(part.counts for part in parts), whole.counts)
    assert whole.total.isfinite()
    for name, mean, count in zip(whole.terms, whole.means, whole.counts, strict=True):
        assert count > 0 or mean == 0, f"{name}: an empty term is zero"


@each_objective
def test_objectives_that_pack_say_which_positions_are_real(objective: Objective) -> None:
    assert (corrupt(objective, make_batch([(3, 9), (1, 1)])).is_real is not None) is objective.packs


@each_objective
def test_only_padding_attends_to_padding(objective: Objective) -> None:
    sizes = [(3, 9), (1, 1), (6, 14)]
    corrupted = corrupt(objective, make_batch(sizes, padding=4))
    masks = attention_mask(corrupted)
    for sample, size in enumerate(sizes):
        for row in find_rows(corrupted, sample, len(sizes)):
            real_entries = list_real_entries(corrupted, row, sum(size))
            if masks is None:
                is_right = real_entries == list(range(len(real_entries)))
                assert is_right, "padding on the right is out of causal attention's sight"
            else:
                is_real = torch.zeros(corrupted.input_ids.shape[1], dtype=torch.bool)
                is_real[real_entries] = True
                assert not masks[row][is_real][:, ~is_real].any()
                assert masks[row].any(1).all(), "a query that sees nothing would give NaN"


@each_objective
def test_loss_has_finite_gradients_and_ignores_unlabelled_outputs(objective: Objective) -> None:
    corrupted = corrupt(objective, make_batch([(3, 9), (1, 1), (6, 14)]))
    hidden, head = toy_hidden(corrupted).requires_grad_(), toy_head()
    loss = objective.loss(hidden, head, corrupted)
    loss.total.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    unlabelled = corrupted.labels == IGNORE_INDEX
    assert (hidden.grad[unlabelled] == 0).all()
    if corrupted.num_drafts:
        unlabelled[:, : -corrupted.num_drafts] = False  # drafts may be trained on the outputs of the text
    spoilt = hidden.detach().masked_fill(unlabelled[..., None], float("nan"))
    torch.testing.assert_close(objective.loss(spoilt, head, corrupted).sums, loss.sums)


@each_with_ratios
def test_ratio_one_masks_the_whole_response(objective: Objective) -> None:
    sizes = [(3, 9), (2, 6)]
    corrupted = corrupt(objective, make_batch(sizes), ratio=1.0)
    assert corrupted.is_masked is not None
    for row, (_, response) in enumerate(sizes):
        assert int(corrupted.is_masked[row].sum()) >= response


@each_without_masks
def test_without_masks_a_ratio_masks_nothing(objective: Objective) -> None:
    corrupted = corrupt(objective, make_batch([(3, 9), (2, 6)]), ratio=1.0)
    assert corrupted.is_masked is not None
    assert not corrupted.is_masked.any()


@each_with_ratios
@pytest.mark.parametrize("ratio", [0.0, 1.01])
def test_wrong_ratio_is_refused(objective: Objective, ratio: float) -> None:
    with pytest.raises(ValueError, match="mask_ratio"):
        corrupt(objective, make_batch([(2, 6)]), ratio=ratio)


def corrupt_without_mask_token(objective: Objective) -> None:
    batch = make_batch([(2, 6)])
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    objective.corrupt(batch, noise, replace(special_tokens(objective), mask_token_id=None))


@each_with_masks
def test_missing_mask_token_is_refused_where_one_is_needed(objective: Objective) -> None:
    with pytest.raises(ValueError, match="mask_token_id"):
        corrupt_without_mask_token(objective)


@each_without_masks
def test_without_masks_no_mask_token_is_needed(objective: Objective) -> None:
    corrupt_without_mask_token(objective)


@each_objective
def test_noise_is_the_only_randomness_and_the_batch_stays_clean(objective: Objective) -> None:
    batch = make_batch([(3, 9), (1, 1), (6, 14)])
    copies = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    state = torch.get_rng_state()
    first = corrupt(objective, batch)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in copies.items():
        assert torch.equal(getattr(batch, name), value), name
    torch.manual_seed(99)
    second = corrupt(objective, batch)
    for name, value in vars(first).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(second, name)), name


@each_objective
@pytest.mark.parametrize("ratio", [None, 0.3])
def test_bf16_as_default_type_changes_nothing(objective: Objective, ratio: float | None) -> None:
    """Lightning sets torch's default type to bf16 while it trains in ``bf16-true``."""
    batch = make_batch([(3, 5 + i % 9) for i in range(301)])  # bf16 cannot represent 301: a count of rows would be off
    expected = corrupt(objective, batch, ratio=ratio)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        actual = corrupt(objective, batch, ratio=ratio)
    finally:
        torch.set_default_dtype(before)
    for name, value in vars(expected).items():
        if isinstance(value, Tensor):
            assert torch.equal(getattr(actual, name), value), name
            assert getattr(actual, name).dtype == value.dtype, name
        else:
            assert getattr(actual, name) == value, name


@each_objective
@pytest.mark.parametrize("ratio", [None, 0.5])
def test_tensors_are_made_on_the_batchs_device(objective: Objective, ratio: float | None) -> None:
    batch = make_batch([(3, 9), (1, 1)])
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    mask_ratio = None if ratio is None else torch.full((2,), ratio)
    hidden_size, head = 6, toy_head()
    # A tensor made without an explicit device lands on the meta device and fails later.
    with torch.device("meta"):
        corrupted = objective.corrupt(batch, noise, special_tokens(objective), mask_ratio=mask_ratio)
        hidden = torch.zeros(*corrupted.input_ids.shape, hidden_size, dtype=torch.float64, device="cpu")
        loss = objective.loss(hidden, head, corrupted).total
    assert loss.device.type == "cpu"
    assert all(value.device.type == "cpu" for value in vars(corrupted).values() if isinstance(value, Tensor))


@each_objective
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_gives_what_the_cpu_gives(objective: Objective) -> None:
    batch = make_batch([(3, 9), (1, 1), (6, 14)], padding=2)
    here, there = corrupt(objective, batch), corrupt(objective, batch.to("cuda")).to("cpu")
    for name, value in vars(here).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, getattr(there, name))


@each_objective
def test_options_cannot_change(objective: Objective) -> None:
    with pytest.raises(FrozenInstanceError):
        objective.chunk_size = 3  # type: ignore[misc]
    assert replace(objective) == objective
    assert isinstance(hash(objective), int)
    assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(type(objective)).parameters.values())


def test_all_objectives_have_a_public_name() -> None:
    exported = {cls for name in objectives.__all__ if (cls := getattr(objectives, name)) is not Objective}
    ours = [cls for cls in concrete_subclasses(Objective) if cls.__module__.startswith("refusion_lit.")]
    assert exported <= set(ours)
    assert all(getattr(objectives, cls.__name__) is cls for cls in ours), "plugins' objectives, too"


@each_objective
def test_corrupting_on_an_accelerator_equals_the_cpu_and_waits_at_most_once(objective: Objective) -> None:
    """A wait for the accelerator stalls training. Only the width of a batch that grows is worth a wait."""
    batch = make_batch([(3, 17), (0, 5), (6, 11)])
    expected = corrupt(objective, batch)
    with ShadowDevice() as device:
        corrupted = corrupt(objective, batch.to(SHADOW, non_blocking=True))
        has_new_shape = corrupted.input_ids.shape != batch.input_ids.shape or isinstance(objective, SerialHybrid)
        assert device.num_waits <= has_new_shape
        for name, value in vars(expected).items():
            if isinstance(value, Tensor):
                assert torch.equal(getattr(corrupted, name).cpu(), value), name


@pytest.mark.parametrize("cls", concrete_subclasses(Objective))
def test_options_of_another_kind_are_refused_by_name(cls: type[Objective], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its check of types runs in tests only
    kinds = {field.name: str(field.type) for field in fields(cls)}
    numbers = [name for name, kind in kinds.items() if re.search(r"int|float", kind)]
    for name, value in product(numbers, ("a", [1], True)):
        if not (value == [1] and kinds[name].startswith("tuple")):
            with pytest.raises(ValueError, match=rf"^objective\.{name}: expected .*, got .*; .*\.$"):
                cls(**{name: value})
