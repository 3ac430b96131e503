"""The hybrid objective against slow references, the laws of its noise, and the released program's losses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import permutations, product
from math import ceil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid
from refusion_lit.refusion.objective import draw_slot_sizes
from refusion_lit.types import ModelTraits, SpecialTokens
from support.attention_masks import attention_mask

PAD, MASK = 0, 2
GOLDENS = Path(__file__).parents[1] / "goldens"
Noise = Callable[[ResponseBatch], KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (5, 4), (2, 33), (7, 8), (4, 31)]


def slow_row(
    tokens: list[int], prompt_length: int, slot_size: int, p: float, masks: list[float], order: list[float]
) -> tuple[list[int], list[int], list[int], list[bool], list[float]]:
    """Corrupt a sample slot by slot: prompt, clean slots in a random order, masked slots in text order.

    Args:
        tokens: The sample without padding.
        prompt_length: Number of tokens of the prompt.
        slot_size: Size of a slot; the last slot may be shorter.
        p: Probability that a slot is masked.
        masks: A random number for each slot, below ``p`` for masked slots.
        order: A random number for each slot, by which the clean slots are sorted.

    Returns:
        Token ids, positions, labels, whether a token is masked, and weights.
    """
    response_length = len(tokens) - prompt_length
    slots = [
        list(range(start, min(start + slot_size, len(tokens))))
        for start in range(prompt_length, len(tokens), slot_size)
    ]
    clean = [number for number in range(len(slots)) if masks[number] >= p]
    masked = [number for number in range(len(slots)) if masks[number] < p]
    rows: list[tuple[int, int, int, bool, float]] = [
        (tokens[place], place, IGNORE_INDEX, False, 0.0) for place in range(prompt_length)
    ]
    for number in sorted(clean, key=lambda number: order[number]):
        slot = slots[number]
        for j, place in enumerate(slot):
            last = j == len(slot) - 1
            label = IGNORE_INDEX if last else tokens[slot[j + 1]]
            rows.append((tokens[place], place, label, False, 0.0 if last else 1.0))
    for number in masked:
        rows += [(MASK, place, tokens[place], True, 1 / (p * response_length)) for place in slots[number]]
    ids, positions, labels, is_masked, weights = (list(column) for column in zip(*rows, strict=True))
    return ids, positions, labels, is_masked, weights  # type: ignore[return-value]


@pytest.mark.parametrize("slot_sizes", [(4, 8, 16, 32), (3,), (1, 5)])
@pytest.mark.parametrize("ratio", [None, 0.4, 1.0])
@pytest.mark.parametrize("epoch", range(4))
def test_equals_the_slow_reference(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Callable[..., KeyedNoise],
    special_tokens: SpecialTokens,
    slot_sizes: tuple[int, ...],
    ratio: float | None,
    epoch: int,
) -> None:
    batch = make_batch(LENGTHS, width=45)
    noise = make_noise(batch, epoch)
    ratios = None if ratio is None else torch.full((len(LENGTHS),), ratio)
    corrupted = Hybrid(slot_sizes=slot_sizes).corrupt(batch, noise, special_tokens, mask_ratio=ratios)

    sizes = draw_slot_sizes(noise, slot_sizes).tolist()
    # A drawn ratio is uniform from the objective's ``eps``, 0.001, to 1. A given ratio is a float32.
    drawn = [0.001 + 0.999 * u for u in noise.uniform("mask_ratio", 1)[:, 0].tolist()]
    p = drawn if ratio is None else [float(torch.tensor(ratio))] * len(drawn)
    masks, order = noise.uniform("slot_mask", 50).tolist(), noise.uniform("slot_order", 50).tolist()
    for row, (prompt, response) in enumerate(LENGTHS):
        length = prompt + response
        tokens = batch.input_ids[row, :length].tolist()
        ids, positions, labels, masked, weights = slow_row(tokens, prompt, sizes[row], p[row], masks[row], order[row])
        padding = batch.input_ids.shape[1] - length
        assert corrupted.input_ids[row].tolist() == ids + [PAD] * padding
        assert corrupted.position_ids[row].tolist() == positions + list(range(length, length + padding))
        assert corrupted.labels[row].tolist() == labels + [IGNORE_INDEX] * padding
        assert corrupted.is_masked is not None
        assert corrupted.is_masked[row].tolist() == masked + [False] * padding
        assert corrupted.weights[row].tolist() == pytest.approx(weights + [0.0] * padding)
        assert corrupted.terms[row].tolist() == [int(value) for value in masked] + [0] * padding
    num_clean_labels = int(((corrupted.labels != IGNORE_INDEX) & ~corrupted.is_masked).sum())
    assert corrupted.counts.tolist() == [num_clean_labels, len(LENGTHS)]
    assert attention_mask(corrupted) is None


def make_many_samples(
    make_batch: Callable[..., ResponseBatch], make_noise: Noise, prompt: int, response: int, num_rows: int = 20_000
) -> tuple[ResponseBatch, KeyedNoise]:
    """Return many samples of the same lengths, and their noise, to compare frequencies with probabilities."""
    batch = make_batch([(prompt, response)] * num_rows)
    return batch, make_noise(batch)


def masked_slots(corrupted: CorruptedBatch, prompt: int, slot_size: int) -> torch.Tensor:
    """Return which slots of each row are masked, from the positions of its masks."""
    assert corrupted.is_masked is not None
    in_text_order = torch.zeros_like(corrupted.is_masked).scatter(1, corrupted.position_ids, corrupted.is_masked)
    return in_text_order[:, prompt::slot_size]


def test_slot_sizes_are_equally_frequent(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Noise,
    chi_square: Callable[..., float],
    special_tokens: SpecialTokens,
) -> None:
    batch, noise = make_many_samples(make_batch, make_noise, 1, 32)
    # With nothing masked, every token but the last of a slot has a label, so the number of labels gives the slot size.
    objective = Hybrid(slot_sizes=(4, 8, 16, 32))
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=torch.full((20_000,), 1e-12))
    num_slots = Counter((32 - (corrupted.labels != IGNORE_INDEX).sum(1)).tolist())
    assert set(num_slots) == {1, 2, 4, 8}
    assert chi_square(list(num_slots.values()), [5000] * 4) < 16.3  # 3 degrees of freedom, p = 0.001


def test_slots_are_masked_independently_with_the_given_ratio(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Noise,
    chi_square: Callable[..., float],
    special_tokens: SpecialTokens,
) -> None:
    batch, noise = make_many_samples(make_batch, make_noise, 2, 11)
    objective = Hybrid(slot_sizes=(4,))
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=torch.full((20_000,), 0.3))
    patterns = Counter(map(tuple, masked_slots(corrupted, 2, 4).tolist()))
    keys = list(product((False, True), repeat=3))  # eleven tokens are three slots of four
    expected = [20_000 * 0.3 ** sum(key) * 0.7 ** (3 - sum(key)) for key in keys]
    assert chi_square([patterns[key] for key in keys], expected) < 24.3  # 7 degrees of freedom, p = 0.001


def test_mask_ratio_is_uniform_when_drawn(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Noise,
    chi_square: Callable[..., float],
    special_tokens: SpecialTokens,
) -> None:
    batch, noise = make_many_samples(make_batch, make_noise, 1, 5)
    corrupted = Hybrid(slot_sizes=(1,), eps=1e-9).corrupt(batch, noise, special_tokens)
    # If the mask ratio is uniform, the number of masked slots among n slots is uniform on 0 .. n.
    counts = Counter(masked_slots(corrupted, 1, 1).sum(1).tolist())
    assert chi_square([counts[number] for number in range(6)], [20_000 / 6] * 6) < 20.5  # 5 degrees of freedom
    weights = corrupted.weights[corrupted.is_masked]
    assert weights.min() >= 1 / 5 - 1e-6
    assert Hybrid(slot_sizes=(1,), eps=0.5).corrupt(batch, noise, special_tokens).weights.max() <= 1.0, "p >= eps"


def test_clean_slots_come_in_every_order_equally_often(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Noise,
    chi_square: Callable[..., float],
    special_tokens: SpecialTokens,
) -> None:
    batch, noise = make_many_samples(make_batch, make_noise, 1, 8, num_rows=12_000)
    objective = Hybrid(slot_sizes=(3,))
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=torch.full((12_000,), 1e-12))
    slots = {0: (1, 2, 3), 1: (4, 5, 6), 2: (7, 8)}
    orders = Counter(map(tuple, corrupted.position_ids[:, 1:].tolist()))
    expected = [sum((slots[number] for number in order), ()) for order in permutations(range(3))]
    assert set(orders) == set(expected), "slots move as wholes, the short one too"
    assert chi_square([orders[key] for key in expected], [2000] * 6) < 20.5  # 5 degrees of freedom, p = 0.001


def test_epochs_differ_and_repeat(
    make_batch: Callable[..., ResponseBatch], make_noise: Callable[..., KeyedNoise], special_tokens: SpecialTokens
) -> None:
    batch = make_batch(LENGTHS)
    first, again, second = (
        Hybrid().corrupt(batch, make_noise(batch, epoch), special_tokens).input_ids for epoch in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_all_masked_gives_zero_for_the_autoregressive_term(
    make_batch: Callable[..., ResponseBatch], make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    batch = make_batch([(2, 5), (3, 4)])
    objective = Hybrid()
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens, mask_ratio=torch.ones(2))
    hidden = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.nn.Linear(4, 100)
    loss = objective.loss(hidden, head, corrupted)
    assert loss.named_means()["ar"].item() == 0.0
    assert loss.named_means()["mdm"].item() > 0
    loss.total.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_coefficients_weigh_the_terms(
    make_batch: Callable[..., ResponseBatch], make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    batch = make_batch(LENGTHS)
    objective = Hybrid(ar_weight=0.5, mdm_weight=3.0)
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens)
    hidden = torch.randn(*corrupted.input_ids.shape, 4, generator=torch.Generator().manual_seed(0))
    loss = objective.loss(hidden, torch.nn.Linear(4, 100), corrupted)
    means = loss.named_means()
    assert loss.total.item() == pytest.approx(0.5 * means["ar"].item() + 3.0 * means["mdm"].item(), rel=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 37])
def test_released_programs_losses(chunk_size: int | None) -> None:
    golden = json.loads((GOLDENS / "refusion_loss_mid.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(GOLDENS / "models" / golden["model"], dtype=torch.float32)
    objective = Hybrid(chunk_size=chunk_size)
    for values in golden["batches"]:
        tensors = {name: torch.tensor(value) for name, value in values.items()}
        layout = CorruptedBatch(
            input_ids=tensors["input_ids"],
            position_ids=tensors["position_ids"],
            labels=tensors["labels"],
            terms=tensors["is_masked"].long(),
            weights=torch.zeros(tensors["labels"].shape),
            counts=torch.zeros(2),
        )
        corrupted = objective.targets(
            layout, mask_probability=tensors["mask_probability"], response_lengths=tensors["response_lengths"]
        )
        length = layout.input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        with torch.no_grad():
            hidden = model.model(
                layout.input_ids, position_ids=layout.position_ids, attention_mask=causal, use_cache=False
            ).last_hidden_state
            loss = objective.loss(hidden, model.lm_head, corrupted)
        assert loss.named_means()["ar"].item() == pytest.approx(values["ar_loss"], abs=1e-5)
        assert loss.named_means()["mdm"].item() == pytest.approx(values["mdm_loss"], abs=1e-5)
        assert loss.total.item() == pytest.approx(values["loss"], abs=1e-5)


def test_model_trained_elsewhere_has_a_low_loss_under_our_corruption(
    make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    """Weights that the released program trained predict the labels of our layout, so both layouts mean the same."""
    directory = GOLDENS / "models" / "additions-clean"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    objective = Hybrid()
    losses = []
    for number, values in enumerate(json.loads((GOLDENS / "refusion_loss_mid.json").read_text())["batches"]):
        batch = ResponseBatch(
            input_ids=torch.tensor(values["clean_input_ids"]),
            prompt_lengths=torch.tensor(values["prompt_lengths"]),
            response_lengths=torch.tensor(values["response_lengths"]),
            sample_keys=torch.arange(len(values["labels"])) + 10 * number,
        )
        corrupted = objective.corrupt(batch, make_noise(batch), special_tokens)
        length = batch.input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        with torch.no_grad():
            hidden = model.model(
                corrupted.input_ids, position_ids=corrupted.position_ids, attention_mask=causal, use_cache=False
            ).last_hidden_state
            losses.append(objective.loss(hidden, model.lm_head, corrupted))
    ar, mdm = (sum(loss.sums for loss in losses) / sum(loss.counts for loss in losses)).tolist()
    assert ar < 0.1, "guessing among the 18 tokens gives 2.9"
    assert mdm < 1.0


def test_released_programs_labels_follow_our_rules() -> None:
    """Rebuild each golden layout with ``slow_row`` from its clean batch, its masks and its order of slots.

    A golden does not record the slot size, so one of the sizes must give the golden.
    """
    golden = json.loads((GOLDENS / "refusion_loss_mid.json").read_text())
    for values in golden["batches"]:
        for row, prompt in enumerate(values["prompt_lengths"]):
            length = prompt + values["response_lengths"][row]
            tokens, positions = values["clean_input_ids"][row], values["position_ids"][row]
            is_masked = values["is_masked"][row]
            num_slots_by_size = {size: ceil((length - prompt) / size) for size in (4, 8, 16, 32)}
            candidates = []
            for size, num_slots in num_slots_by_size.items():
                starts = [prompt + number * size for number in range(num_slots)]
                masks = [0.0 if is_masked[positions.index(start)] else 1.0 for start in starts]
                order = [float(positions.index(start)) for start in starts]
                candidates.append(slow_row(tokens[:length], prompt, size, 0.5, masks, order)[:4])
            observed = tuple(
                values[name][row][:length] for name in ("input_ids", "position_ids", "labels", "is_masked")
            )
            assert observed in candidates


@pytest.mark.parametrize(
    "options",
    [
        {"slot_sizes": ()},
        {"slot_sizes": (4, 0)},
        {"eps": 0.0},
        {"eps": 1.5},
        {"mdm_weight": -0.5},
        {"ar_weight": -0.5},
        {"chunk_size": 0},
    ],
)
def test_impossible_options_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Hybrid(**options)


def test_traits() -> None:
    assert Hybrid().traits == ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
