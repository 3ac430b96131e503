"""Likelihoods: proper distributions, equal to what the decoders draw from, bounds that are unbiased."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import comb

import pytest
import torch
from torch import Tensor

from fakes import EOS, MASK, PAD, tiny_backbone
from refusion_lit.decoding import (
    Autoregressive,
    BlockDiffusion,
    Decoder,
    LLaDA,
    ReFusion,
    SelfSpeculative,
    TrajectoryRecorder,
    decode,
)
from refusion_lit.engine.trajectory import Trajectory
from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import (
    BlockBound,
    GroupPolicy,
    LeftToRight,
    Likelihood,
    MaskedBound,
    MeanField,
    NextToken,
    Rounds,
    SlotBound,
)
from refusion_lit.training.rollouts import engine_log_probabilities
from refusion_lit.types import Prompt, SamplingParams

PROMPT = (3, 4, 5)


def batch_of(responses: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] | None = None) -> ResponseBatch:
    prompts = prompts or [PROMPT] * len(responses)
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    return ResponseBatch(
        input_ids=torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        prompt_lengths=torch.tensor([len(p) for p in prompts]),
        response_lengths=torch.tensor([len(r) for r in responses]),
        sample_keys=torch.arange(len(rows)) * 1_000_003 + 7,
    )


def laid(model: Backbone, objective: GroupPolicy, batch: ResponseBatch, epoch: int = 0) -> CorruptedBatch:
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=epoch)
    return objective.corrupt(batch, noise, model.special_tokens)


def token_values(model: Backbone, objective: GroupPolicy, corrupted: CorruptedBatch) -> Tensor:
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    return objective.log_probabilities(hidden, model.head, corrupted)[0]


def answers(
    model: Backbone, likelihood: Likelihood, batch: ResponseBatch, temperature: float = 1.0, epoch: int = 0
) -> Tensor:
    """Return the log-likelihood (or an estimate of it) of each answer."""
    objective = GroupPolicy(likelihood=likelihood, temperature=temperature, unit="sequence")
    with torch.no_grad():
        corrupted = laid(model, objective, batch, epoch)
        values = (token_values(model, objective, corrupted) * corrupted.weights.double()).sum(1)
    return values.view(corrupted.num_views, -1).sum(0)


def allowed(model: Backbone) -> list[int]:
    return [token for token in range(model.special_tokens.vocab_size) if token not in (PAD, MASK)]


def small(model: Backbone, num_letters: int) -> Backbone:
    """Return the model with a vocabulary of EOS and the first letters, so that all answers can be listed."""
    model.special_tokens = replace(model.special_tokens, vocab_size=3 + num_letters)
    return model


def every_answer(model: Backbone, limit: int) -> list[tuple[int, ...]]:
    letters = [token for token in allowed(model) if token != EOS]
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
    model = small(tiny_backbone(likelihood.traits), 3)
    texts = every_answer(model, 3)
    total = answers(model, likelihood, batch_of(texts), temperature).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-12)


def sampled(
    model: Backbone, decoder: Decoder, temperature: float = 1.0, limit: int = 10
) -> tuple[list[tuple[int, ...]], list[dict[int, float]], list[Trajectory]]:
    prompts = [Prompt(token_ids=tuple(3 + (i * j) % 9 for j in range(1 + i % 4)), id=f"p{i}") for i in range(6)]
    recorder = TrajectoryRecorder(decoder)
    sampling = SamplingParams(max_new_tokens=limit, temperature=temperature, seed=5)
    output = decode(model, decoder, prompts, sampling, batch_size=3, callbacks=[recorder], trace=True)
    size = getattr(decoder, "slot_size", None)
    engine = [engine_log_probabilities(r, len(p.token_ids), size) for p, r in zip(prompts, output.rows, strict=True)]
    return (
        [tuple(row.token_ids) for row in output.rows],
        engine,
        [recorder.trajectories[i] for i in range(len(prompts))],
    )


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
def test_replayed_probabilities_are_those_of_the_decode(likelihood: Likelihood, decoder: Decoder) -> None:
    model = tiny_backbone(likelihood.traits)
    texts, engine, trajectories = sampled(model, decoder)
    batch = batch_of(texts, [each.prompt_ids.tolist() for each in trajectories])
    objective = GroupPolicy(likelihood=likelihood)
    corrupted = laid(model, objective, batch)
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    plain = objective.log_probabilities(hidden, model.head, corrupted)[1]
    assert corrupted.places is not None
    for row, (text, expected) in enumerate(zip(texts, engine, strict=True)):
        assert sorted(expected) == list(range(len(text)))
        found = {int(p): float(v) for p, v in zip(corrupted.places[row], plain[row], strict=True) if p >= 0}
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("likelihood", [NextToken(), *(LeftToRight(slot_size=k) for k in (1, 3))], ids=repr)
def test_an_answers_likelihood_does_not_depend_on_the_batch(likelihood: Likelihood) -> None:
    model = tiny_backbone(likelihood.traits)
    texts = [(5, 6, 7, 8, EOS), (9, EOS), (4, 5, 6)]
    together = answers(model, likelihood, batch_of(texts))
    alone = torch.cat([answers(model, likelihood, batch_of([text])) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@torch.no_grad()
def last_logits(model: Backbone, ids: Sequence[int]) -> Tensor:
    hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
    logits = model.head(hidden[0, -1])[: model.special_tokens.vocab_size]
    logits[[PAD, MASK]] = -torch.inf
    return logits


def test_one_forward_is_the_product_of_the_steps_of_a_plain_loop() -> None:
    model = tiny_backbone(LeftToRight().traits)
    text, size = (5, 6, 7, 8, 9, EOS), 4
    ids = list(PROMPT)
    expected = 0.0
    for place, token in enumerate(text):
        is_first = place % size == 0
        logits = last_logits(model, [*ids, MASK] if is_first else ids)
        expected += float(logits.log_softmax(-1)[token])
        ids.append(token)
    found = answers(model, LeftToRight(slot_size=size), batch_of([text]))
    assert float(found) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("infill", ["mask", "autoregressive"])
@pytest.mark.parametrize("thresholds", [(0.02, 0.02), (0.05, 0.9), (0.0, 0.15)])
def test_rounds_replay_every_draft_that_was_followed(fused: bool, infill: str, thresholds: tuple[float, float]) -> None:
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
    batch = batch_of([row.token_ids for row in output.rows], [prompt.token_ids for prompt in prompts])
    batch = replace(batch, trajectories=trajectories)
    objective = GroupPolicy(likelihood=likelihood)
    corrupted = laid(model, objective, batch)
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    plain = objective.log_probabilities(hidden, model.head, corrupted)[1]
    num_plans = 0
    for row, generation in enumerate(output.rows):
        expected = []
        for entry, following in zip(generation.trace, generation.trace[1:], strict=False):
            if "plan" in entry.phase and following.phase.startswith("verify"):
                # A verification beside the plan scores tokens and draws none, so all that is drawn is the plan's.
                drawn = sorted(zip(entry.positions, entry.probabilities, strict=True))
                expected += [probability for _, probability in drawn]
                num_plans += 1
        found = plain[row][corrupted.labels[row] >= 0].exp().tolist()
        assert found == pytest.approx(expected, rel=1e-9)
    assert num_plans > len(prompts)


def test_fewer_rounds_are_an_unbiased_estimate() -> None:
    decoder = ReFusion(slot_size=2, num_serial_blocks=1, slot_threshold=1.0)
    model = tiny_backbone(Rounds().traits)
    texts, _, trajectories = sampled(model, decoder)
    batch = replace(batch_of(texts, [each.prompt_ids.tolist() for each in trajectories]), trajectories=trajectories)
    whole = answers(model, Rounds(slot_size=2), batch)
    some = torch.stack([answers(model, Rounds(slot_size=2, max_rounds=2), batch, epoch=e) for e in range(300)])
    assert some.std(0).max() > 0.1
    errors = (some.mean(0) - whole).abs() / (some.std(0) / 300**0.5 + 1e-9)
    assert float(errors.max()) < 4.5


def order_bound(model: Backbone, text: Sequence[int]) -> float:
    """Return the any-order bound of a masked model by enumeration of all sets of masks."""
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


@pytest.mark.parametrize("coupled", [True, False])
def test_the_coupled_bound_is_unbiased_and_coupling_lowers_its_variance(coupled: bool) -> None:
    model = tiny_backbone(MaskedBound().traits)
    text = (5, 6, 7, EOS)
    exact = order_bound(model, text)
    # 2 x 2 forwards against 4 x 1: as many forwards each.
    likelihood = MaskedBound(num_samples=1 if coupled else 2, coupled=coupled)
    batch = replace(batch_of([text] * 4000), sample_keys=torch.arange(4000) * 77 + 1)
    found = answers(model, likelihood, batch)
    assert abs(float(found.mean()) - exact) < 4.5 * float(found.std()) / 4000**0.5
    if coupled:
        other = answers(model, MaskedBound(num_samples=1, coupled=False), batch)
        assert float(found.std()) < float(other.std())


def test_the_slot_bound_is_unbiased_over_subsets_of_slots() -> None:
    """One slot of the answer's two, and whole answers, follow from left-to-right likelihoods of slots."""
    likelihood = SlotBound(slot_size=2, num_samples=1, coupled=False)
    model = tiny_backbone(likelihood.traits)
    single = (5, 6)  # one slot: the bound is exact
    batch = replace(batch_of([single] * 600), sample_keys=torch.arange(600) * 77 + 1)
    found = answers(model, likelihood, batch)
    exact = float(answers(model, LeftToRight(slot_size=2), batch_of([single])))
    assert sorted(set(found.round(decimals=9).tolist())) == pytest.approx([2 * exact, 0.0], abs=1e-8)
    assert abs(float(found.mean()) - exact) < 4.5 * float(found.std()) / 600**0.5


def test_slots_of_a_bound_see_visible_slots_and_not_one_another() -> None:
    likelihood = SlotBound(slot_size=2, num_samples=2)
    model = tiny_backbone(likelihood.traits)
    batch = batch_of([(5, 6, 7, 8, 9, 3, EOS)] * 5)
    corrupted = laid(model, GroupPolicy(likelihood=likelihood, unit="sequence"), batch)
    seen = corrupted.attention_mask
    assert seen is not None
    assert corrupted.places is not None
    assert corrupted.is_masked is not None
    for row in range(len(corrupted.input_ids)):
        places = (corrupted.position_ids[row] - len(PROMPT)).tolist()
        targets = {p // 2 for p in corrupted.places[row].tolist() if p >= 0}
        for i, place in enumerate(places):
            if not 0 <= place < 7 or place // 2 not in targets:
                continue
            others = {places[j] // 2 for j in seen[row, i].nonzero()[:, 0].tolist() if places[j] >= 0}
            assert others - {place // 2} == {0, 1, 2, 3} - targets
            if corrupted.is_masked[row, i]:
                assert (
                    place // 2 not in others
                    or seen[row, i].sum() == len(PROMPT) + sum(1 for p in range(7) if p // 2 not in targets) + 1
                )


def test_levels_of_a_block_bound_mask_every_block() -> None:
    likelihood = BlockBound(block_size=4, num_levels=3)
    model = tiny_backbone(likelihood.traits)
    batch = batch_of([(5, 6, 7, 8, 9, EOS), (5, EOS)])
    corrupted = laid(model, GroupPolicy(likelihood=likelihood, unit="sequence"), batch)
    assert corrupted.is_masked is not None
    half = corrupted.input_ids.shape[1] // 2
    for row in range(6):
        last = 12 if row % 2 == 0 else 8
        for start in range(0, last, 4):
            inside = range(max(start, len(PROMPT)), start + 4)
            assert corrupted.is_masked[row, list(inside)].any()
        assert not corrupted.is_masked[row, last:].any()
        assert not corrupted.is_masked[row, half:].any()


def test_a_bound_of_blocks_of_one_token_is_exact() -> None:
    """Blocks of one token are decoded from left to right, each from its mask and the clean text before it."""
    likelihood = BlockBound(block_size=1, num_levels=1)
    model = tiny_backbone(likelihood.traits)
    text = (5, 6, EOS)
    expected = 0.0
    for place in range(3):
        ids = [*PROMPT, *text[:place], MASK]
        logits = last_logits(model, ids)
        expected += float(logits.log_softmax(-1)[text[place]])
    assert float(answers(model, likelihood, batch_of([text]))) == pytest.approx(expected, abs=1e-9)


def refusals() -> Iterator[tuple[Likelihood, Decoder, str]]:
    yield NextToken(), LLaDA(), "not of LLaDA"
    yield NextToken(), SelfSpeculative(slot_size=4), "slot_size 4"
    yield LeftToRight(slot_size=4), SelfSpeculative(slot_size=8), "slot_size 8"
    yield LeftToRight(slot_size=4), ReFusion(slot_size=4), "not of ReFusion"
    yield Rounds(slot_size=4), SelfSpeculative(slot_size=4), "not of SelfSpeculative"
    yield Rounds(slot_size=4), ReFusion(slot_size=4, infill="bonus"), "bonus"
    yield MaskedBound(), BlockDiffusion(), "not of BlockDiffusion"
    yield BlockBound(), LLaDA(), "not of LLaDA"
    yield MeanField(), Autoregressive(), "not of Autoregressive"


@pytest.mark.parametrize(("likelihood", "decoder", "reason"), list(refusals()), ids=repr)
def test_other_decoders_are_refused_with_the_reason(likelihood: Likelihood, decoder: Decoder, reason: str) -> None:
    with pytest.raises(ValueError, match=f"objective.likelihood: expected .*{reason}"):
        GroupPolicy(likelihood=likelihood, unit="sequence").check(decoder, SamplingParams())


@pytest.mark.parametrize("option", [{"top_k": 50}, {"top_p": 0.9}])
def test_filters_are_refused(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"model\.sampling\.top_.: expected .* another likelihood"):
        GroupPolicy().check(Autoregressive(), SamplingParams(**option))
