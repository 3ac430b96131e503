"""How much a hidden token's prediction depends on another hidden token, by their distance.

The pilot study of ReFusion (arXiv 2512.13586) motivates slots by a dependency that decays with distance. Measured here
as the change of the predicted distribution at a masked place when one other masked place is revealed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refusion_lit.modeling.attention import order_mask, pattern_order
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.noise import uniform_scalar
from refusion_lit.types import ModelTraits


@dataclass(frozen=True, kw_only=True)
class DependencyCurve:
    """Change of a prediction by the distance of the revealed token.

    Attributes:
        distances: Position of the revealed token minus position of the predicted one; never 0, ascending.
        kl: Mean Kullback-Leibler divergence of the prediction after from the one before, nats, at least 0.
        total_variation: Mean total variation between the two, in [0, 1].
        num_pairs: Pairs of tokens behind each mean.
    """

    distances: list[int]
    kl: list[float]
    total_variation: list[float]
    num_pairs: list[int]


@torch.no_grad()
def dependency_curve(
    model: LanguageModel,
    samples: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_distance: int = 16,
    mask_ratio: float | None = None,
    num_targets: int = 1,
    batch_size: int = 64,
    seed: int = 0,
) -> DependencyCurve:
    """Measure on clean text how much revealing one masked token changes the prediction of another.

    For each sample a ratio is drawn, each response token is masked with that probability, and one more place, the
    target, is masked in any case. Each other masked place within ``max_distance`` of the target is then revealed alone.
    Models with causal attention are fed the known tokens first and the masks behind, as in ReFusion's plan, and
    a single revealed token is then less than a slot: an input such a model was not trained on.

    Args:
        model: Any masked model: its traits say how it attends and where a mask's prediction is read.
        samples: Prompt and response token ids; responses of at least two tokens.
        max_distance: Greatest distance, at least 1.
        mask_ratio: A fixed probability in [0, 1] instead of one drawn uniformly for each sample and target.
        num_targets: Targets drawn for each sample, at least 1.
        batch_size: Sequences a forward, at least 1. Changes no figure but by rounding.
        seed: Seeds ratios, masks and targets.

    Raises:
        ValueError: If the model predicts no masks, or an option is out of range.
    """
    for option, value in (("max_distance", max_distance), ("num_targets", num_targets), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{option}: expected an integer of at least 1, got {value}; set it to 1 or more.")
    if mask_ratio is not None and not 0 <= mask_ratio <= 1:
        raise ValueError(f"mask_ratio: expected a probability in [0, 1], got {mask_ratio}; choose one, or null.")
    shift = _shift(model.traits)
    mask = model.special_tokens.mask_token_id
    if mask is None:
        raise ValueError("model: expected one with a mask token, got none; give a model trained to predict masks.")
    totals = torch.zeros(2 * max_distance + 1, 3, dtype=torch.float64)
    for case in _cases(samples, max_distance, mask_ratio, num_targets, seed):
        rows = [case.fed(mask, None), *(case.fed(mask, place) for place in case.others)]
        predictions = torch.cat(
            [
                _predict(model, rows[i : i + batch_size], case.target - shift, mask)
                for i in range(0, len(rows), batch_size)
            ]
        )
        before, after = predictions[0], predictions[1:]
        kl = (after * (after.clamp_min(1e-300).log() - before.clamp_min(1e-300).log())).sum(-1)
        variation = 0.5 * (after - before).abs().sum(-1)
        for place, *values in zip(case.others, kl.tolist(), variation.tolist(), strict=True):
            totals[place - case.target + max_distance] += torch.tensor([*values, 1.0], dtype=torch.float64)
    distances = [d for d in range(-max_distance, max_distance + 1) if totals[d + max_distance, 2] > 0]
    rows_of = [totals[d + max_distance] for d in distances]
    return DependencyCurve(
        distances=distances,
        kl=[float(row[0] / row[2]) for row in rows_of],
        total_variation=[float(row[1] / row[2]) for row in rows_of],
        num_pairs=[int(row[2]) for row in rows_of],
    )


@dataclass(frozen=True)
class _Case:
    """A text with hidden places, the place that is predicted, and those revealed one at a time."""

    tokens: Sequence[int]
    hidden: frozenset[int]
    target: int
    others: list[int]

    def fed(self, mask: int, revealed: int | None) -> list[int]:
        """Return the text with masks."""
        return [
            mask if place in self.hidden and place != revealed else token for place, token in enumerate(self.tokens)
        ]


def _cases(
    samples: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_distance: int,
    mask_ratio: float | None,
    num_targets: int,
    seed: int,
) -> Iterator[_Case]:
    for index, (prompt, response) in enumerate(samples):
        start, stop = len(prompt), len(prompt) + len(response)
        for number in range(num_targets):
            key = (seed, index, number)
            target = start + int(uniform_scalar("dependency_target", *key) * len(response))
            ratio = uniform_scalar("dependency_ratio", *key) if mask_ratio is None else mask_ratio
            hidden = {p for p in range(start, stop) if uniform_scalar("dependency_mask", *key, p) < ratio}
            others = sorted(p for p in hidden - {target} if abs(p - target) <= max_distance)
            if others:
                yield _Case([*prompt, *response], frozenset(hidden | {target}), target, others)


def _shift(traits: ModelTraits) -> int:
    predictions = traits.predictions or ("mask",)
    if "mask" in predictions:
        return 0
    if "mask_shifted" in predictions:
        return 1
    raise ValueError(
        f"model: expected one that predicts masks, got one trained for {', '.join(predictions)}; "
        "train with the objective Hybrid, Masked or BlockMasked."
    )


def _predict(model: LanguageModel, rows: list[list[int]], read_at: int, mask: int) -> Tensor:
    """Return the distributions [row, vocab] read at a position of each text, float64."""
    tokens = torch.tensor(rows)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if model.traits.attention == "causal":  # known tokens first, masks behind, both in text order
        sequence = (tokens == mask).long().argsort(dim=1, stable=True)
        tokens, positions = tokens.gather(1, sequence), positions.gather(1, sequence)
    order = pattern_order(model.traits, positions)
    visible = order_mask(order, torch.full((len(rows),), tokens.shape[1]))
    device = model.device
    hidden = model.hidden_states(tokens.to(device), positions.to(device), visible.to(device))
    at = (positions == read_at).long().argmax(dim=1)
    logits = model.logits(hidden[torch.arange(len(rows), device=device), at.to(device)])
    return logits.double().softmax(-1).cpu()
