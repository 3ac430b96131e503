"""The loss of GroupPolicy: gradients of the expected reward, ratios and clipping, divergences, advantages."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import pytest
import torch
from experiments.policy_estimators.likelihoods import MaskedBound, Rounds
from hypothesis import settings
from torch import Tensor

from contrib.rl.test_likelihood import corrupt, list_all_answers, log_likelihoods, make_batch, shrink_vocabulary
from modeling.fused.test_invariant import backbone
from refusion_lit.contrib.rl import GroupPolicy, LeftToRight, NextToken, TrajectoryRecorder
from refusion_lit.contrib.rl.likelihood import LaidOut
from refusion_lit.contrib.rl.objective import group_advantages, replace_overlong_rewards
from refusion_lit.contrib.rl.rollouts import engine_log_probabilities
from refusion_lit.decoding import Autoregressive, ReFusion, SelfSpeculative, decode
from refusion_lit.learning.batch import LossOutput
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import Prompt, SamplingParams
from support.example_counts import THOROUGH
from support.fakes import EOS, tiny_backbone

TEXTS = [(5, 6, 7, 8, EOS), (9, EOS), (4, 5, 6)]
ADVANTAGES = torch.tensor([1.5, -0.5, -1.0], dtype=torch.float64)


def make_hybrid() -> Backbone:
    """Return a tiny random model whose masks and clean tokens predict, as slots need it."""
    return tiny_backbone(LeftToRight().traits)


def compute_loss(model: Backbone, objective: GroupPolicy, corrupted: LaidOut) -> LossOutput:
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    return objective.loss(hidden, model.head, corrupted)


def corrupt_texts(model: Backbone, objective: GroupPolicy, advantages: Tensor = ADVANTAGES) -> LaidOut:
    """Lay out ``TEXTS`` as a training batch."""
    return corrupt(model, objective, replace(make_batch(TEXTS), advantages=advantages))


def log_probabilities(model: Backbone, objective: GroupPolicy, corrupted: LaidOut) -> Tensor:
    """Return the log-probability of every label; zero without a label."""
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    return objective.log_probabilities(hidden, model.head, corrupted)[0]


def gradient(model: Backbone, value: Tensor) -> Tensor:
    """Return the gradient of a value with respect to all weights, as a vector."""
    model.zero_grad()
    value.backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.model.parameters()])


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_the_first_update_has_ratio_one_and_the_value_of_the_advantages(unit: str) -> None:
    model = make_hybrid()
    objective = GroupPolicy(likelihood=LeftToRight(slot_size=2), unit=unit, max_new_tokens=20)
    loss = compute_loss(model, objective, corrupt_texts(model, objective))
    means = loss.named_means()
    # The sum over the tokens of an answer is divided by the budget of 20 tokens; a sequence counts as a whole.
    weights = torch.tensor([len(text) if unit == "token" else 20 for text in TEXTS]).double() / 20
    assert float(means["policy"]) == pytest.approx(-float((weights * ADVANTAGES).mean()), abs=1e-12)
    assert float(means["clipped_low"]) == float(means["clipped_high"]) == 0
    assert float(means["entropy"]) > 0
    old = log_probabilities(model, objective, corrupt_texts(model, objective)).detach()
    again = compute_loss(model, objective, replace(corrupt_texts(model, objective), old=old))
    torch.testing.assert_close(again.sums, loss.sums, rtol=0, atol=1e-12)


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_clipping_acts_past_its_bounds_alone(unit: str) -> None:
    """The ratio has no gradient above 1.3 if the advantage is positive, and below 0.8 if it is negative."""
    model = make_hybrid()
    objective = GroupPolicy(likelihood=LeftToRight(slot_size=2), unit=unit, clip_low=0.2, clip_high=0.3)
    corrupted = corrupt_texts(model, objective)
    values = log_probabilities(model, objective, corrupted).detach()
    labelled = corrupted.labels >= 0
    for ratio, is_low, is_high in [
        (1.29, False, False),
        (1.31, False, True),
        (0.81, False, False),
        (0.79, True, False),
    ]:
        old = (values - math.log(ratio)).where(labelled, 0.0)
        loss = compute_loss(model, objective, replace(corrupted, old=old))
        means = loss.named_means()
        assert (float(means["clipped_low"]) > 0) is is_low
        assert (float(means["clipped_high"]) > 0) is is_high
        slopes = gradient(model, loss.total)
        only_positive = compute_loss(model, objective, replace(corrupted, old=old, advantages=ADVANTAGES.clamp(min=0)))
        only_negative = compute_loss(model, objective, replace(corrupted, old=old, advantages=ADVANTAGES.clamp(max=0)))
        assert bool((gradient(model, only_positive.total) == 0).all()) is is_high
        assert bool((gradient(model, only_negative.total) == 0).all()) is is_low
        assert not (slopes == 0).all()


def test_equal_rewards_give_no_gradient() -> None:
    model = make_hybrid()
    objective = GroupPolicy(likelihood=LeftToRight(slot_size=2))
    advantages = group_advantages(torch.full((1, 3), 0.1, dtype=torch.float64), scale=True)
    loss = compute_loss(model, objective, corrupt_texts(model, objective, advantages[0]))
    assert (gradient(model, loss.total) == 0).all()


@pytest.mark.parametrize("likelihood", [NextToken(), LeftToRight(slot_size=2)], ids=repr)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_the_loss_is_the_gradient_of_the_expected_reward(
    likelihood: NextToken | LeftToRight, temperature: float
) -> None:
    """In place of samples the batch has all answers, weighted by their probabilities, so the comparison is exact."""
    model = shrink_vocabulary(tiny_backbone(likelihood.traits), 2)
    texts = list_all_answers(model, 3)
    rewards = torch.tensor([float(len(set(text))) - 0.3 * text.count(3) for text in texts], dtype=torch.float64)
    objective = GroupPolicy(likelihood=likelihood, temperature=temperature, max_new_tokens=3)
    batch = make_batch(texts)
    plain = corrupt(model, objective, batch)
    sums = log_probabilities(model, objective, plain).sum(1)
    expected = gradient(model, (sums.exp() * rewards).sum())
    weights = sums.detach().exp() * rewards
    corrupted = corrupt(model, objective, replace(batch, advantages=weights))
    loss = compute_loss(model, objective, corrupted)
    slopes = gradient(model, -loss.sums[0] * 3)  # the loss is divided by the budget of three tokens
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-12)


@cache
def count_draws() -> Counter[tuple[int, ...]]:
    """Count the texts of at most three tokens in 12 000 draws; 100 000 under the profile ``thorough``.

    Drawing is slow, so the two tests below share the draws. The prompts are equal; without ``share_prefixes`` the
    engine does not compare each new prompt with all prompts in flight.
    """
    num_answers = 100_000 if settings.get_current_profile_name() == THOROUGH else 12_000
    model = shrink_vocabulary(tiny_backbone(LeftToRight().traits), 2)
    sampling = SamplingParams(max_new_tokens=3, temperature=1.0, seed=11)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, num_answers, 2000):
        prompts = [Prompt(token_ids=(3, 4, 5), id=f"p/{i}") for i in range(first, first + 2000)]
        decoder = SelfSpeculative(slot_size=2)
        rows = decode(model, decoder, prompts, sampling, batch_size=128, share_prefixes=False).rows
        counts.update(tuple(row.token_ids) for row in rows)
    return counts


def test_answers_are_drawn_as_often_as_their_likelihood_says() -> None:
    likelihood = LeftToRight(slot_size=2)
    model = shrink_vocabulary(tiny_backbone(likelihood.traits), 2)
    texts = list_all_answers(model, 3)
    probability = log_likelihoods(model, likelihood, make_batch(texts)).exp()
    counts = torch.tensor([count_draws()[text] for text in texts]).double()
    size = count_draws().total()
    deviations = (counts - size * probability) / (size * probability * (1 - probability)).sqrt()
    assert float(counts.sum()) == size >= 12_000
    assert float(deviations.abs().max()) < 4.5


def test_the_estimate_from_answers_that_were_drawn_agrees_with_the_expected_gradient() -> None:
    """The two gradients agree along five random directions, within four standard errors."""
    likelihood = LeftToRight(slot_size=2)
    model = shrink_vocabulary(tiny_backbone(likelihood.traits), 2)
    texts = list_all_answers(model, 3)
    objective = GroupPolicy(likelihood=likelihood, max_new_tokens=3)
    rewards = torch.tensor([float(len(set(text))) - 0.3 * text.count(3) for text in texts], dtype=torch.float64)
    sums = log_probabilities(model, objective, corrupt(model, objective, make_batch(texts))).sum(1)
    expected = gradient(model, (sums.exp() * rewards).sum())
    counts = torch.tensor([count_draws()[text] for text in texts])
    indices = torch.arange(len(texts)).repeat_interleave(counts)
    advantages = group_advantages(rewards[indices][None], scale=False)[0]
    directions = torch.randn(5, len(expected), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slopes = []
    for index in range(len(texts)):
        sums = log_probabilities(
            model, objective, corrupt(model, objective, make_batch(texts[index : index + 1]))
        ).sum()
        slopes.append(directions @ gradient(model, sums))
    values = torch.stack(slopes)[indices] * advantages[:, None]
    errors = values.std(0) / count_draws().total() ** 0.5
    assert float(((values.mean(0) - directions @ expected) / errors).abs().max()) < 4
    assert float((directions @ expected / errors).abs().max()) > 100


def test_drafts_save_forwards_and_leave_texts_and_loss_as_they_are() -> None:
    """Rollouts may use drafts: equal noise gives equal answers, slot by slot, with and without drafts."""
    model, likelihood = make_hybrid(), LeftToRight(slot_size=4)
    objective = GroupPolicy(likelihood=likelihood, max_new_tokens=12)
    prompts = [Prompt(token_ids=(3, 4, 5), id=f"p/{i}") for i in range(8)]
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2)
    advantages = torch.linspace(-1, 1, 8, dtype=torch.float64)
    results = []
    for num_drafts in (0, 4):
        decoder = SelfSpeculative(slot_size=4, num_drafts=num_drafts, layout="single_forward")
        rows = decode(model, decoder, prompts, sampling, batch_size=8).rows
        batch = replace(make_batch([row.token_ids for row in rows]), advantages=advantages)
        loss = compute_loss(model, objective, corrupt(model, objective, batch))
        results.append((sum(row.num_forwards for row in rows), [row.token_ids for row in rows], loss.sums))
    (plain, texts, expected), (drafted, other_texts, sums) = results
    assert drafted < plain
    assert other_texts == texts
    assert torch.equal(sums, expected)


def test_engine_and_trainer_differ_only_by_the_rounding_of_the_forward_pass_with_gradients() -> None:
    """With ``batch_invariant`` a forward pass over the answer repeats the engine's probabilities to the last bit.

    That forward pass has no gradients. Training uses transformers' forward pass, which adds in another order.
    """
    model = backbone("qwen3", torch.float32)
    model.traits = NextToken().traits
    prompts = [Prompt(token_ids=(3, 4, 5 + i), id=f"p/{i}") for i in range(4)]
    recorder = TrajectoryRecorder(Autoregressive())
    sampling = SamplingParams(max_new_tokens=20, temperature=1.0, seed=2)
    rows = decode(model, Autoregressive(), prompts, sampling, batch_size=4, callbacks=[recorder], trace=True).rows
    texts = [row.token_ids for row in rows]
    objective = GroupPolicy()
    corrupted = corrupt(model, objective, make_batch(texts, [prompt.token_ids for prompt in prompts]))
    assert corrupted.places is not None
    targets = corrupted.labels >= 0
    engine = torch.zeros(corrupted.labels.shape, dtype=torch.float64)
    for number, row in enumerate(rows):
        values = engine_log_probabilities(row, recorder.trajectories[number])
        for index in targets[number].nonzero()[:, 0].tolist():
            engine[number, index] = values[len(prompts[number].token_ids) + int(corrupted.places[number, index])]
    with torch.no_grad():
        logits = model.logits(model.hidden_states(corrupted.input_ids, corrupted.position_ids, None))
    replayed = logits.softmax(-1).gather(2, corrupted.labels.clamp(min=0)[..., None])[..., 0].double().log()
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    trained = objective.log_probabilities(hidden, model.head, corrupted)[1].double()
    assert torch.equal(replayed[targets], engine[targets])
    assert 0 < float((trained - engine)[targets].abs().max()) < 1e-4


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_log_probabilities_without_and_with_gradients_are_equal_to_the_last_bit(chunk_size: int | None) -> None:
    """Before several updates on the same answers, old log-probabilities are computed without gradients."""
    model = backbone("qwen3", torch.float32)
    objective = GroupPolicy(likelihood=LeftToRight(slot_size=2), chunk_size=chunk_size)
    corrupted = corrupt_texts(model, objective)
    with torch.no_grad():
        old = log_probabilities(model, objective, corrupted)
    values = log_probabilities(model, objective, corrupted)
    assert values.requires_grad
    assert torch.equal(old, values)


def test_the_mean_of_k3_is_the_divergence_of_the_engine_from_the_trainer() -> None:
    """The mean is over all tokens that the engine could draw, weighted by the engine's probabilities."""
    model, objective = tiny_backbone(NextToken().traits), GroupPolicy()
    tokens = range(model.special_tokens.vocab_size)

    def head(states: Tensor) -> Tensor:
        return model.head(states)[:, : len(tokens)]  # all that a text may hold

    batch = replace(
        make_batch([(token,) for token in tokens]), advantages=torch.zeros(len(tokens), dtype=torch.float64)
    )
    engine = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(0)
    corrupted = corrupt(model, objective, batch)
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible).detach()
    trainer = head(hidden[0, 2:3])[0].detach().double().log_softmax(0)
    total = 0.0
    for token in tokens:
        only = torch.full_like(corrupted.weights, torch.nan, dtype=torch.float64)
        only[token, corrupted.labels[token] >= 0] = engine[token]
        figures = objective.loss(hidden, head, replace(corrupted, engine=only))
        total += float(engine[token].exp() * figures.sums.detach()[list(objective.terms).index("engine_kl")])
    assert total == pytest.approx(float((engine.exp() * (engine - trainer)).sum()), abs=1e-9)


@pytest.mark.parametrize("thresholds", [(1.0, 0.0), (0.4, 0.4)])
def test_trajectories_are_drawn_as_often_as_their_likelihood_says(thresholds: tuple[float, float]) -> None:
    """A trajectory includes discarded drafts; its likelihood is the share of decodes that draw the same tokens."""
    likelihood = Rounds(slot_size=2)
    model = shrink_vocabulary(tiny_backbone(likelihood.traits), 2)
    decoder = ReFusion(
        slot_size=2, num_serial_blocks=1, slot_threshold=thresholds[0], token_threshold=thresholds[1], fused=False
    )
    size = 300
    prompts = [Prompt(token_ids=(3, 4, 5), id=f"p/{i}") for i in range(size)]
    recorder = TrajectoryRecorder(decoder)
    sampling = SamplingParams(max_new_tokens=4, temperature=1.0, seed=11)
    rows = decode(model, decoder, prompts, sampling, batch_size=size, callbacks=[recorder], trace=True).rows
    by_draws: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index in range(size):
        trajectory = recorder.trajectories[index]
        plans = [number for number, phase in enumerate(trajectory.phases, 1) if phase == "plan"]
        is_drafted = np.isin(trajectory.draws[:, 0], plans)  # the first column is the number of the forward pass
        draws = tuple(map(tuple, trajectory.draws[is_drafted].tolist()))
        by_draws.setdefault(draws, []).append(index)
    firsts = [indices[0] for indices in by_draws.values()]
    batch = make_batch([rows[index].token_ids for index in firsts])
    batch = replace(batch, trajectories=[recorder.trajectories[index] for index in firsts])
    probability = log_likelihoods(model, likelihood, batch).exp()
    drawn = torch.tensor([len(indices) for indices in by_draws.values()]).double()
    deviations = (drawn - size * probability) / (size * probability * (1 - probability)).sqrt()
    assert len(by_draws) > 5
    assert float(deviations[size * probability > 5].abs().max()) < 4.5
    assert 0.7 < float(probability.sum()) <= 1 + 1e-9


def test_answers_of_a_group_differ() -> None:
    model = tiny_backbone(NextToken().traits)
    prompts = [Prompt(token_ids=(3, 4, 5), id=f"p/{i}") for i in range(8)]
    rows = decode(
        model, Autoregressive(), prompts, SamplingParams(max_new_tokens=8, temperature=1.0), batch_size=8
    ).rows
    assert len({tuple(row.token_ids) for row in rows}) > 4


def test_leave_one_out_and_scaled_advantages_are_parallel() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, math.nan, 1.0, 0.0]], dtype=torch.float64)
    scaled, plain = (group_advantages(rewards, scale=scale) for scale in (True, False))
    assert plain[0].tolist() == pytest.approx([r - (2.5 - r) / 3 for r in rewards[0].tolist()])
    ratio = scaled / plain
    assert ratio[0].tolist() == pytest.approx([float(ratio[0, 0])] * 4)
    assert (scaled[1] == 0).all()
    assert (plain[1] == 0).all()
    assert scaled[2, 1] == plain[2, 1] == 0
    assert plain[2, [0, 2, 3]].tolist() == pytest.approx([-0.5, 1.0, -0.5])
    assert float(scaled[0].square().sum() / 3) == pytest.approx(1, abs=1e-3)


def test_the_expected_gradient_of_k2_is_the_gradient_of_the_divergence() -> None:
    """The penalty ``kl_weight`` therefore moves the policy towards the reference model."""
    likelihood = NextToken()
    model = shrink_vocabulary(tiny_backbone(likelihood.traits), 2)  # three tokens may be drawn
    objective = GroupPolicy(likelihood=likelihood, kl_weight=1.0, unit="sequence")
    texts = [(token,) for token in (EOS, 3, 4)]
    batch = replace(make_batch(texts), advantages=torch.zeros(3, dtype=torch.float64))
    corrupted = corrupt(model, objective, batch)
    # With respect to hidden states: transformers' norms compute in float32, also backwards.
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)[:1].detach().requires_grad_()
    values = objective.log_probabilities(hidden.expand(3, -1, -1), model.head, corrupted)[0]
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_policy = values.sum(1)
    (expected,) = torch.autograd.grad((log_policy.exp() * (log_policy - reference)).sum(), hidden, retain_graph=True)
    dense = reference[:, None].expand_as(values)
    total = torch.zeros_like(expected)
    for number in range(3):
        sample = corrupt(
            model, objective, replace(make_batch(texts[number : number + 1]), advantages=torch.zeros(1).double())
        )
        loss = objective.loss(hidden, model.head, replace(sample, reference=dense[number : number + 1]))
        total += log_policy[number].detach().exp() * torch.autograd.grad(loss.sums[1], hidden)[0]
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)


def k3(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate of a divergence; ``log_ratio`` is log(p / q) where p draws and q is compared with it."""
    return torch.exp(-log_ratio) - 1 + log_ratio


def test_expected_gradients_of_the_estimates_of_a_divergence() -> None:
    """The expectations are over draws of the policy.

    k1 has the expected gradient zero, k2 the gradient of KL(policy, reference), and k3 that of KL(reference, policy).
    """
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    log_policy, reference = logits.log_softmax(0), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_ratio = log_policy - reference

    def slope(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    drawn_with = log_policy.detach().exp()
    k1, k2, k3_slope = (slope(drawn_with @ values) for values in (log_ratio, log_ratio**2 / 2, k3(log_ratio)))
    to_reference, to_policy = slope(log_policy.exp() @ log_ratio), slope(reference.exp() @ -log_ratio)
    torch.testing.assert_close(k1, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(k2, to_reference, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(k3_slope, to_policy, rtol=1e-12, atol=1e-15)
    assert float((to_reference - to_policy).abs().max()) > 0.05


def test_the_engine_is_compared_by_k3_and_the_reference_by_k2() -> None:
    """The figure ``engine_kl`` is the k3 estimate and the loss term ``kl`` the k2 estimate, for three short answers."""
    model = shrink_vocabulary(tiny_backbone(NextToken().traits), 2)
    objective = GroupPolicy(unit="sequence")
    batch = replace(make_batch([(token,) for token in (EOS, 3, 4)]), advantages=torch.zeros(3, dtype=torch.float64))
    corrupted = corrupt(model, objective, batch)
    other = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()[:, None].expand(corrupted.labels.shape)
    other = other.where(corrupted.labels >= 0, torch.nan)
    hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible).detach()
    with torch.no_grad():
        values, plain, _ = objective.log_probabilities(hidden, model.head, corrupted)
        loss = objective.loss(hidden, model.head, replace(corrupted, engine=other, reference=other.nan_to_num(nan=0.0)))
    for name, terms in {"engine_kl": k3(other - plain), "kl": (values - other) ** 2 / 2}.items():
        value = float(loss.sums[list(objective.terms).index(name)])
        assert value == pytest.approx(float(terms.nansum()), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "objective.group_size: expected .* 2"),
        ({"temperature": 0.0}, "objective.temperature"),
        ({"clip_low": 1.5}, "objective.clip_low"),
        ({"unit": "token", "likelihood": MaskedBound()}, "objective.unit: expected sequence"),
        ({"num_updates": 0}, "objective.num_updates"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupPolicy(**options)


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        ("lowest", [[-2.0, -3.0, -3.0], [math.nan, 0.5, 0.5]]),
        ("drop", [[-2.0, math.nan, -3.0], [math.nan, math.nan, 0.5]]),
        ("zero", [[-2.0, 0.0, -3.0], [math.nan, 0.0, 0.5]]),
    ],
)
def test_answers_cut_at_the_limit_have_the_reward_that_is_asked_for(
    overlong: Literal["lowest", "drop", "zero"], expected: list[list[float]]
) -> None:
    rewards = torch.tensor([[-2.0, -1.0, -3.0], [math.nan, 2.0, 0.5]])
    is_overlong = torch.tensor([[False, True, False], [True, True, False]])
    actual = replace_overlong_rewards(rewards, is_overlong, overlong)
    torch.testing.assert_close(actual, torch.tensor(expected), equal_nan=True)
