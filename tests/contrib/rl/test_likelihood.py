"""Likelihoods of answers, which reinforcement learning differentiates.

Exact likelihoods are proper distributions and equal the probabilities with which decoders draw; bounds are unbiased.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import comb, prod
from typing import Any

import pytest
import torch
from experiments.policy_estimators.likelihoods import BlockBound, MaskedBound, MeanField, Rounds, SlotBound
from torch import Tensor

from refusion_lit.contrib.rl import GroupPolicy, LeftToRight, Likelihood, NextToken, TrajectoryRecorder
from refusion_lit.contrib.rl.likelihood import Answers, LaidOut
from refusion_lit.contrib.rl.rollouts import engine_log_probabilities
from refusion_lit.contrib.rl.trajectory import Trajectory
from refusion_lit.decoding import Autoregressive, BlockDiffusion, Decoder, LLaDA, ReFusion, SelfSpeculative, decode
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import Prompt, SamplingParams
from support.fakes import EOS, MASK, PAD, tiny_backbone

PROMPT = (3, 4, 5)


def make_batch(responses: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] | None = None) -> Answers:
    """Return answers to ``PROMPT``, or to given prompts, as a padded batch."""
    prompts = prompts or [PROMPT] * len(responses)
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    return Answers(
        input_ids=torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        prompt_lengths=torch.tensor([len(p) for p in prompts]),
        response_lengths=torch.tensor([len(r) for r in responses]),
        sample_keys=torch.arange(len(rows)) * 1_000_003 + 7,
    )


def corrupt(model: Backbone, objective: GroupPolicy, batch: ResponseBatch, epoch: int = 0) -> LaidOut:
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=epoch)
    return objective.corrupt(batch, noise, model.special_tokens)


def compute_token_values(model: Backbone, objective: GroupPolicy, corrupted: LaidOut) -> Tensor:
    """Return the log-probability of every label; zero without a label."""
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    return objective.log_probabilities(hidden, model.head, corrupted)[0]


def log_likelihoods(
    model: Backbone, likelihood: Likelihood, batch: ResponseBatch, temperature: float = 1.0, epoch: int = 0
) -> Tensor:
    """Return the log-likelihood of each answer; for a bound, an estimate of the bound."""
    objective = GroupPolicy(likelihood=likelihood, temperature=temperature, unit="sequence")
    with torch.no_grad():
        corrupted = corrupt(model, objective, batch, epoch)
        values = (compute_token_values(model, objective, corrupted) * corrupted.weights.double()).sum(1)
    return values.view(corrupted.num_views, -1).sum(0)


def allowed_ids(model: Backbone) -> list[int]:
    return [token for token in range(model.special_tokens.vocab_size) if token not in (PAD, MASK)]


def shrink_vocabulary(model: Backbone, num_letters: int) -> Backbone:
    """Leave the model a vocabulary of the EOS token and a few letters, so that all answers can be listed."""
    model.special_tokens = replace(model.special_tokens, vocab_size=3 + num_letters)
    return model


def list_all_answers(model: Backbone, limit: int) -> list[tuple[int, ...]]:
    """Return all answers of up to ``limit`` tokens: those that end with EOS, and those that are cut."""
    letters = [token for token in allowed_ids(model) if token != EOS]
    ended = [(*word, EOS) for n in range(limit) for word in product(letters, repeat=n)]
    return ended + list(product(letters, repeat=limit))


EXACT = [
    (NextToken(), ("next_token",)),
    *((LeftToRight(slot_size=k), ("mask", "next_token_in_slot")) for k in (1, 2, 3)),
]


@pytest.mark.parametrize(("likelihood", "predictions"), EXACT, ids=repr)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_exact_likelihoods_are_proper_distributions(
    likelihood: Likelihood, predictions: tuple[str, ...], temperature: float
) -> None:
    model = shrink_vocabulary(tiny_backbone(likelihood.traits), 3)
    texts = list_all_answers(model, 3)
    total = log_likelihoods(model, likelihood, make_batch(texts), temperature).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-12)


def sample(
    model: Backbone, decoder: Decoder, temperature: float = 1.0, limit: int = 10
) -> tuple[list[tuple[int, ...]], list[dict[int, float]], list[Trajectory]]:
    """Sample answers to six prompts.

    Returns:
        For each prompt the answer, the log-probabilities with which the engine drew its tokens by place, and the
        trajectory.
    """
    prompts = [Prompt(token_ids=tuple(3 + (i * j) % 9 for j in range(1 + i % 4)), id=f"p{i}") for i in range(6)]
    recorder = TrajectoryRecorder(decoder)
    sampling = SamplingParams(max_new_tokens=limit, temperature=temperature, seed=5)
    output = decode(model, decoder, prompts, sampling, batch_size=3, callbacks=[recorder], trace=True)
    trajectories = [recorder.trajectories[i] for i in range(len(prompts))]
    engine = []
    for row, trajectory in zip(output.rows, trajectories, strict=True):
        start = len(trajectory.prompt_ids)
        engine.append({p - start: value for p, value in engine_log_probabilities(row, trajectory).items()})
    return [tuple(row.token_ids) for row in output.rows], engine, trajectories


@pytest.mark.parametrize(
    ("likelihood", "decoder"),
    [
        (NextToken(), Autoregressive()),
        (LeftToRight(slot_size=4), SelfSpeculative(slot_size=4)),
        (LeftToRight(slot_size=4), SelfSpeculative(slot_size=4, num_drafts=0)),
        (LeftToRight(slot_size=3), SelfSpeculative(slot_size=3, layout="single_forward")),
        (LeftToRight(slot_size=1), SelfSpeculative(slot_size=1, layout="two_forwards")),
    ],
    ids=repr,
)
def test_the_likelihood_equals_the_probabilities_with_which_the_decoder_drew(
    likelihood: Likelihood, decoder: Decoder
) -> None:
    """Otherwise a policy would be trained on answers of another policy."""
    model = tiny_backbone(likelihood.traits)
    texts, engine, trajectories = sample(model, decoder)
    batch = make_batch(texts, [trajectory.prompt_ids.tolist() for trajectory in trajectories])
    objective = GroupPolicy(likelihood=likelihood)
    corrupted = corrupt(model, objective, batch)
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    plain = objective.log_probabilities(hidden, model.head, corrupted)[1]
    assert corrupted.places is not None
    for row, (text, expected) in enumerate(zip(texts, engine, strict=True)):
        assert sorted(expected) == list(range(len(text)))
        replayed = {int(p): float(v) for p, v in zip(corrupted.places[row], plain[row], strict=True) if p >= 0}
        assert replayed == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("likelihood", [NextToken(), *(LeftToRight(slot_size=k) for k in (1, 3))], ids=repr)
def test_an_answers_likelihood_does_not_depend_on_the_batch(likelihood: Likelihood) -> None:
    model = tiny_backbone(likelihood.traits)
    texts = [(5, 6, 7, 8, EOS), (9, EOS), (4, 5, 6)]
    together = log_likelihoods(model, likelihood, make_batch(texts))
    alone = torch.cat([log_likelihoods(model, likelihood, make_batch([text])) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@torch.no_grad()
def compute_last_logits(model: Backbone, ids: Sequence[int], positions: Sequence[int] | None = None) -> Tensor:
    """Return the logits of the last token, minus infinity for padding and mask; by default positions are 0, 1, ..."""
    places = torch.arange(len(ids)) if positions is None else torch.tensor(positions)
    hidden = model(torch.tensor([ids]), places[None], None)
    logits = model.head(hidden[0, -1])[: model.special_tokens.vocab_size]
    logits[[PAD, MASK]] = -torch.inf
    return logits


def test_the_likelihood_of_left_to_right_slots_equals_a_loop_over_the_tokens() -> None:
    """The first token of a slot is predicted by a mask, other tokens by the token before."""
    model = tiny_backbone(LeftToRight().traits)
    text, size = (5, 6, 7, 8, 9, EOS), 4
    ids = list(PROMPT)
    expected = 0.0
    for place, token in enumerate(text):
        is_first = place % size == 0
        logits = compute_last_logits(model, [*ids, MASK] if is_first else ids)
        expected += float(logits.log_softmax(-1)[token])
        ids.append(token)
    likelihood = log_likelihoods(model, LeftToRight(slot_size=size), make_batch([text]))
    assert float(likelihood) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("infill", ["mask", "autoregressive"])
@pytest.mark.parametrize("thresholds", [(0.02, 0.02), (0.05, 0.9), (0.0, 0.15)])
def test_rounds_replay_every_draft_that_was_followed(fused: bool, infill: str, thresholds: tuple[float, float]) -> None:
    """The likelihood of a ReFusion trajectory has the probabilities of all drafts of plans that were verified."""
    decoder = ReFusion(
        slot_size=3, num_serial_blocks=2, slot_threshold=thresholds[0], token_threshold=thresholds[1], fused=fused,
        infill=infill,
    )  # fmt: skip
    likelihood = Rounds(slot_size=3)
    model = tiny_backbone(likelihood.traits)
    prompts = [Prompt(token_ids=(3, 4, 5 + i), id=f"p{i}") for i in range(6)]
    recorder = TrajectoryRecorder(decoder)
    sampling = SamplingParams(max_new_tokens=13, temperature=1.0, seed=2)
    output = decode(model, decoder, prompts, sampling, batch_size=2, callbacks=[recorder], trace=True)
    trajectories = [recorder.trajectories[i] for i in range(len(prompts))]
    batch = make_batch([row.token_ids for row in output.rows], [prompt.token_ids for prompt in prompts])
    batch = replace(batch, trajectories=trajectories)
    objective = GroupPolicy(likelihood=likelihood)
    corrupted = corrupt(model, objective, batch)
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    plain = objective.log_probabilities(hidden, model.head, corrupted)[1]
    num_plans = 0
    for row, generation in enumerate(output.rows):
        expected = []
        num_before = num_plans
        for entry, following in zip(generation.trace, generation.trace[1:], strict=False):
            if "plan" in entry.phase and following.phase.startswith("verify"):
                # A verification beside the plan scores tokens and draws none, so all that is drawn is the plan's.
                drawn = sorted(zip(entry.positions, entry.probabilities, strict=True))
                expected += [probability for _, probability in drawn]
                num_plans += 1
        replayed = plain[row][corrupted.labels[row] >= 0].exp().tolist()
        assert replayed == pytest.approx(expected, rel=1e-9)
        order = trajectories[row].order
        num_final, block = int((order >= 0).sum()), len(order) // 2
        num_positions = int(corrupted.is_real[row].sum())
        assert num_positions <= len(prompts[row].token_ids) + num_final + (num_plans - num_before) * block
    assert num_plans > len(prompts)


def enumerate_order_bound(model: Backbone, text: Sequence[int]) -> float:
    """Return the any-order bound of a masked model, by enumeration of all sets of masks."""
    size = len(text)
    total = 0.0
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            ids = [*PROMPT, *(MASK if i in chosen else token for i, token in enumerate(text))]
            everything = torch.ones(1, len(ids), len(ids), dtype=torch.bool)
            with torch.no_grad():
                hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], everything)
                logits = model.head(hidden[0, len(PROMPT) :])[:, : model.special_tokens.vocab_size]
            logits[:, [PAD, MASK]] = -torch.inf
            values = logits.log_softmax(-1)
            total += sum(float(values[i, text[i]]) for i in chosen) / count / comb(size, count)
    return total


class ListedNoise(KeyedNoise):
    """Noise that leads to given numbers and sets of masks.

    Args:
        numbers: For each row the number in [0, 1) that determines how many tokens are masked.
        sets: For each row and sample the places to mask.
    """

    def __init__(self, numbers: Sequence[float], sets: Sequence[Sequence[Sequence[int]]]) -> None:
        self.numbers, self.sets = torch.tensor(numbers, dtype=torch.float64), sets

    def uniform(self, stream: str, size: int) -> Tensor:
        assert (stream, size) == ("count", 1)
        return self.numbers[:, None]

    def bits(self, stream: str, size: int) -> Tensor:
        """Return 0 at the places to mask and 1 elsewhere: places are masked in ascending order."""
        assert stream.startswith("order ")
        ranks = torch.ones(len(self.sets), size, dtype=torch.int64)
        for row, sets in enumerate(self.sets):
            ranks[row, [len(PROMPT) + place for place in sets[int(stream.removeprefix("order "))]]] = 0
        return ranks


@pytest.mark.parametrize("num_samples", [1, 2])
def test_the_average_over_all_counts_and_masks_is_the_bound(num_samples: int) -> None:
    """All random choices are enumerated, each weighted by its probability, so the average is exact."""
    text = (5, 6, 7, EOS)
    likelihood = MaskedBound(num_samples=num_samples)
    model = tiny_backbone(likelihood.traits)
    numbers, chosen, probabilities = [], [], []
    for tenth in range(10):  # two samples are half of [0, 1) apart: a count changes at every tenth
        number = (tenth + 0.5) / 10
        counts = [int((number + i / num_samples) % 1 * (len(text) + 1)) for i in range(num_samples)]
        for sets in product(*(combinations(range(len(text)), count) for count in counts)):
            numbers.append(number)
            chosen.append(sets)
            probabilities.append(1 / 10 / prod(comb(len(text), count) for count in counts))
    objective = GroupPolicy(likelihood=likelihood, unit="sequence")
    batch = make_batch([text] * len(numbers))
    corrupted = objective.corrupt(batch, ListedNoise(numbers, chosen), model.special_tokens)
    with torch.no_grad():
        values = (compute_token_values(model, objective, corrupted) * corrupted.weights.double()).sum(1)
    average = values.view(corrupted.num_views, -1).sum(0) @ torch.tensor(probabilities, dtype=torch.float64)
    assert sum(probabilities) == pytest.approx(1)
    assert {places for sets in chosen for places in sets} == {
        places for count in range(len(text) + 1) for places in combinations(range(len(text)), count)
    }
    assert float(average) == pytest.approx(
        enumerate_order_bound(model, text), abs=1e-6
    )  # norms and weights are in float32


def test_the_bound_is_unbiased_and_coupling_lowers_its_variance() -> None:
    text = (5, 6, 7, EOS)
    likelihood = MaskedBound(num_samples=1)
    model = tiny_backbone(likelihood.traits)
    exact = enumerate_order_bound(model, text)
    objective = GroupPolicy(likelihood=likelihood, unit="sequence")
    batch = replace(make_batch([text] * 4000), sample_keys=torch.arange(4000) * 77 + 1)
    corrupted = corrupt(model, objective, batch)
    with torch.no_grad():
        values = (compute_token_values(model, objective, corrupted) * corrupted.weights.double()).sum(1)
    first, second = values.view(2, -1)
    coupled = first + second
    assert abs(float(coupled.mean()) - exact) < 4.5 * float(coupled.std()) / 4000**0.5
    # A single view of twice the weight is unbiased, too. Two independent views would have half its variance; coupled
    # views have less.
    assert abs(2 * float(first.mean()) - exact) < 4.5 * 2 * float(first.std()) / 4000**0.5
    assert float(coupled.std()) < 2 * float(first.std()) / 2**0.5


def enumerate_block_bound(model: Backbone, text: Sequence[int], size: int) -> float:
    """Return the bound over orders inside blocks, by enumeration; a block attends to the clean blocks before it."""
    start, end = len(PROMPT), len(PROMPT) + len(text)
    ids = [*PROMPT, *text] + [MASK] * (-end % size)
    total = 0.0
    for begin in range(start // size * size, end, size):
        places = [place for place in range(begin, begin + size) if start <= place < end]
        for count in range(1, len(places) + 1):
            for chosen in combinations(places, count):
                fed = torch.tensor([[MASK if place in chosen else ids[place] for place in range(begin + size)]])
                blocks = torch.arange(begin + size) // size
                with torch.no_grad():
                    hidden = model(fed, torch.arange(begin + size)[None], (blocks[:, None] >= blocks)[None])
                    logits = model.head(hidden[0])[:, : model.special_tokens.vocab_size]
                logits[:, [PAD, MASK]] = -torch.inf
                values = logits.log_softmax(-1)
                total += sum(float(values[i, ids[i]]) for i in chosen) / count / comb(len(places), count)
    return total


@pytest.mark.parametrize("text", [(5, 6, 7, 8, 9, EOS), (5, 6, 7, EOS), (9,)], ids=str)
def test_the_bound_of_blocks_is_unbiased(text: tuple[int, ...]) -> None:
    """The prompt ends inside a block, and so do two of the texts."""
    size, num_rows = 4, 600
    model = tiny_backbone(BlockBound(block_size=size).traits)
    exact = enumerate_block_bound(model, text, size)
    batch = replace(make_batch([text] * num_rows), sample_keys=torch.arange(num_rows) * 77 + 1)
    for num_samples in (1, 3):
        values = log_likelihoods(model, BlockBound(block_size=size, num_samples=num_samples), batch)
        error = max(4.5 * float(values.std()) / num_rows**0.5, 1e-6)  # transformers' norms compute in float32
        assert abs(float(values.mean()) - exact) < error
    corrupted = corrupt(model, GroupPolicy(likelihood=BlockBound(block_size=size), unit="sequence"), batch)
    width = corrupted.labels.shape[1] // 2
    in_block = (corrupted.labels[:, :width].unflatten(1, (-1, size)) >= 0).any(2)
    first, last = len(PROMPT) // size, (len(PROMPT) + len(text) - 1) // size
    assert in_block[:, first : last + 1].all(), "each block keeps a mask"


def slot_value(model: Backbone, text: Sequence[int], visible: Sequence[int], slot: int, size: int) -> float:
    """Return a slot's log-probability after the prompt and the ``visible`` slots, in that order, token by token."""
    ids, positions = list(PROMPT), list(range(len(PROMPT)))
    for number in visible:
        places = range(number * size, min((number + 1) * size, len(text)))
        ids += [text[place] for place in places]
        positions += [len(PROMPT) + place for place in places]
    total = 0.0
    for place in range(slot * size, min((slot + 1) * size, len(text))):
        is_first = place == slot * size
        fed = [*positions, len(PROMPT) + place] if is_first else positions
        logits = compute_last_logits(model, [*ids, MASK] if is_first else ids, fed)
        total += float(logits.log_softmax(-1)[text[place]])
        ids.append(text[place])
        positions.append(len(PROMPT) + place)
    return total


def test_bounds_over_slots_predict_a_slot_from_the_prompt_and_the_visible_slots() -> None:
    """``MeanField`` predicts all slots from the prompt alone, ``SlotBound`` from random sets of other slots."""
    text, size = (5, 6, 7, 8, EOS), 3
    model = tiny_backbone(LeftToRight().traits)
    alone = sum(slot_value(model, text, (), slot, size) for slot in (0, 1))
    assert float(log_likelihoods(model, MeanField(slot_size=size), make_batch([text]))) == pytest.approx(
        alone, abs=1e-9
    )
    after = slot_value(model, text, (1,), 0, size) + slot_value(model, text, (0,), 1, size)
    batch = replace(make_batch([text, text[:4]] * 60), sample_keys=torch.arange(120) * 77 + 1)
    bounds = log_likelihoods(model, SlotBound(slot_size=size, num_samples=1), batch)[::2]
    # The number of masked slots is 0, 1 or 2. Both views mask one slot each with weight 3, or one view masks both slots
    # and the other none with weight 3 / 2; the two views are averaged.
    expected = sorted((0.75 * alone, 1.5 * after))
    assert sorted(set(bounds.round(decimals=9).tolist())) == pytest.approx(expected, abs=1e-8)


def list_refusals() -> Iterator[tuple[Likelihood, Decoder, str]]:
    """Yield likelihoods, decoders that draw from another distribution, and what the message names."""
    yield NextToken(), LLaDA(), "LLaDA"
    yield NextToken(), SelfSpeculative(slot_size=4), "slot_size 4"
    yield LeftToRight(slot_size=4), SelfSpeculative(slot_size=8), "slot_size 8"
    yield LeftToRight(slot_size=4), ReFusion(slot_size=4), "ReFusion"
    yield Rounds(slot_size=4), SelfSpeculative(slot_size=4), "SelfSpeculative"
    yield Rounds(slot_size=4), ReFusion(slot_size=4, infill="bonus"), "bonus"
    yield MaskedBound(), Autoregressive(), "Autoregressive"
    yield MaskedBound(), SelfSpeculative(), "SelfSpeculative"
    yield BlockBound(), BlockDiffusion(block_size=8), "block_size 8.* 32"
    yield BlockBound(block_size=8), BlockDiffusion(shifted=True), "shifted"
    yield BlockBound(), LLaDA(), "LLaDA"


@pytest.mark.parametrize(("likelihood", "decoder", "reason"), list(list_refusals()), ids=repr)
def test_other_decoders_are_refused_with_the_reason(likelihood: Likelihood, decoder: Decoder, reason: str) -> None:
    with pytest.raises(ValueError, match=f"objective.likelihood: expected .*{reason}"):
        GroupPolicy(likelihood=likelihood, unit="sequence").check(decoder, SamplingParams())


@pytest.mark.parametrize("option", [{"top_k": 50}, {"top_p": 0.9}, {"stop": ("x",)}], ids=str)
def test_sampling_options_that_change_the_distribution_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"model\.sampling\.{next(iter(option))}: expected "):
        GroupPolicy().check(Autoregressive(), SamplingParams(**option))
