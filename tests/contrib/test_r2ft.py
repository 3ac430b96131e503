"""Rejective fine-tuning against a slow reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from refusion_lit.contrib import R2FT
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import SpecialTokens

EOS, MASK = 1, 2
MakeBatch = Callable[..., ResponseBatch]
Noise = Callable[..., KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (8, 8), (5, 4), (2, 30), (0, 1)]


@pytest.mark.parametrize("ratio", [None, 0.25, 1.0])
@pytest.mark.parametrize("options", [{"min_span": 3, "max_span": 6, "max_unit": 4}, {}])
def test_equals_the_slow_reference(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens, ratio: float | None,
    options: dict[str, float],
) -> None:  # fmt: skip
    batch = make_batch(LENGTHS)
    noise = make_noise(batch)
    ratios = None if ratio is None else torch.full((len(LENGTHS),), ratio)
    objective = R2FT(**options)  # type: ignore[arg-type]
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=ratios)
    assert corrupted.rejected is not None
    cuts, draws = noise.uniform("cut", 1)[:, 0].tolist(), noise.uniform("rejected", 4).tolist()
    num_valid = 0
    for row, (prompt, response) in enumerate(LENGTHS):
        end = prompt + response
        text = batch.input_ids[row].tolist()
        cut = prompt + int(cuts[row] * response) if ratio is None else end - math.ceil(ratio * response)
        assert corrupted.input_ids[row, :end].tolist() == text[:cut] + [MASK] * (end - cut)
        assert corrupted.labels[row, cut:end].tolist() == text[cut:end]
        assert corrupted.weights[row, cut:end].tolist() == pytest.approx([1 / response] * (end - cut))
        expected = [IGNORE_INDEX] * len(text)
        if cut > 0:
            num_valid += 1
            a, b, c, d = draws[row]
            unit = text[max(cut - 1 - int(a * objective.max_unit), 0) : cut]
            unit = unit[int(b * len(unit)) :] + unit[: int(b * len(unit))]
            span = objective.min_span + int(c * (objective.max_span - objective.min_span + 1))
            span = min(span, end - cut)
            expected[cut : cut + span] = (unit * span)[:span]
            expected[cut + int(d * span)] = EOS
        assert corrupted.rejected[row].tolist() == expected
    assert corrupted.counts.tolist() == [num_valid, len(LENGTHS)]


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_the_loss_is_the_formula(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens, chunk_size: int | None
) -> None:
    batch = make_batch([(3, 9), (2, 12), (0, 1)])
    objective = R2FT(min_span=3, max_span=6, beta=2.0, likelihood_weight=0.5, chunk_size=chunk_size)
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens)
    assert corrupted.rejected is not None
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*corrupted.input_ids.shape, 60, dtype=torch.float64, generator=generator)
    loss = objective.loss(logits, lambda values: values, corrupted)
    preferences, likelihoods = [], []
    for row, response in enumerate((9, 12, 1)):
        p = logits[row].log_softmax(-1)
        pairs = [
            [float(p[i, t]) for i, t in enumerate(targets[row].tolist()) if t != IGNORE_INDEX]
            for targets in (corrupted.labels, corrupted.rejected)
        ]
        text = sum(pairs[0]) / response
        likelihoods.append(-text)
        if pairs[1]:
            repetition = sum(pairs[1]) / len(pairs[1])
            preferences.append(math.log(1 + math.exp(-2 * (text - repetition))))
    means = [sum(preferences) / len(preferences), sum(likelihoods) / 3]
    assert len(preferences) == 2
    assert loss.means.tolist() == pytest.approx(means)
    assert float(loss.total) == pytest.approx(means[0] + 0.5 * means[1])


@pytest.mark.parametrize(
    "options",
    [{"max_unit": 0}, {"min_span": 0}, {"max_span": 3}, {"beta": 0.0},
     {"likelihood_weight": -1.0}, {"pad_responses_to": 0}],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        R2FT(**options)  # type: ignore[arg-type]
