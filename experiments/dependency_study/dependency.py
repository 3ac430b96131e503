"""Measures how strongly the prediction of a masked token depends on other masked tokens, by distance.

The pilot study of ReFusion (arXiv 2512.13586) motivates slots by a dependency that decays with distance. Here the
dependency is the change of the predicted distribution at a masked position when one other masked position is revealed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.noise import uniform_scalar
from refusion_lit.types import ModelTraits
from refusion_lit.utils.require import require, require_at_least, require_number

_MIN_PROBABILITY = 1e-300
"""Keeps logarithms of underflowed probabilities finite."""


@dataclass(frozen=True, kw_only=True)
class DependencyCurve:
    """Mean change of a prediction by distance of the revealed token.

    Attributes:
        distances: Position of the revealed token minus position of the predicted token; ascending, without 0.
        kl: Mean Kullback-Leibler divergence of the prediction after the reveal from that before, in nats.
        total_variation: Mean total variation distance of the two predictions, in [0, 1].
        num_pairs: Number of token pairs in each mean.
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
    """Measure how revealing one masked token changes the prediction of another, on given texts.

    For each sample, a mask ratio is drawn, each response token is masked with this probability, and one more position,
    the target, is masked in any case. Then each other masked position within ``max_distance`` of the target is revealed
    alone. Models with causal attention get the known tokens first and the masks after them, as in ReFusion's plan
    forward. A single revealed token is less than a slot, so such a model was not trained on exactly these inputs.

    Args:
        model: A model that predicts masks; its traits determine the attention and where a prediction is read.
        samples: Prompt and response token ids; responses of at least two tokens.
        max_distance: Maximum distance; at least 1.
        mask_ratio: A fixed mask ratio in [0, 1]. By default it is drawn uniformly for each sample and target.
        num_targets: Number of targets per sample; at least 1.
        batch_size: Number of sequences per forward; at least 1. Affects the result by rounding only.
        seed: Seed of ratios, masks and targets.

    Raises:
        ValueError: If the model does not predict masks, or an option is out of range.
    """
    for option, value in (("max_distance", max_distance), ("num_targets", num_targets), ("batch_size", batch_size)):
        require_at_least(option, value, 1)
    if mask_ratio is not None:
        require_number("mask_ratio", mask_ratio, "[0, 1]")
    shift = _prediction_shift(model.traits)
    mask = model.special_tokens.mask_token_id
    if mask is None:
        raise ValueError("model: expected a mask token, got none; use a model trained to predict masks.")
    totals = torch.zeros(2 * max_distance + 1, 3, dtype=torch.float64)
    for case in _cases(samples, max_distance, mask_ratio, num_targets, seed):
        rows = [case.masked(mask, None), *(case.masked(mask, revealed) for revealed in case.others)]
        batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        predictions = torch.cat([_predict(model, batch, case.target - shift, mask) for batch in batches])
        changes = _changes(predictions[0], predictions[1:])
        for revealed, change in zip(case.others, changes, strict=True):
            totals[revealed - case.target + max_distance] += torch.cat((change, change.new_ones(1)))
    distances = [d for d in range(-max_distance, max_distance + 1) if totals[d + max_distance, 2] > 0]
    measured = [totals[d + max_distance].tolist() for d in distances]
    return DependencyCurve(
        distances=distances,
        kl=[kl / count for kl, _, count in measured],
        total_variation=[variation / count for _, variation, count in measured],
        num_pairs=[int(count) for _, _, count in measured],
    )


@dataclass(frozen=True)
class _Case:
    """A text with masked positions, the target among them, and the other positions to reveal one at a time."""

    tokens: Sequence[int]
    hidden: frozenset[int]
    target: int
    others: list[int]

    def masked(self, mask: int, revealed: int | None) -> list[int]:
        """Return the tokens with the mask token at the hidden positions, except the revealed one."""
        return [
            mask if position in self.hidden and position != revealed else token
            for position, token in enumerate(self.tokens)
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


def _changes(before: Float[Tensor, " vocab"], after: Float[Tensor, "row vocab"]) -> Float[Tensor, "row 2"]:
    """Return the Kullback-Leibler divergence and the total variation distance of each distribution from ``before``."""
    log_ratio = after.clamp_min(_MIN_PROBABILITY).log() - before.clamp_min(_MIN_PROBABILITY).log()
    return torch.stack(((after * log_ratio).sum(-1), 0.5 * (after - before).abs().sum(-1)), -1)


def _prediction_shift(traits: ModelTraits) -> int:
    """Return how many positions before a mask its prediction is read."""
    predictions = traits.predictions or ("mask",)
    if "mask" in predictions:
        return 0
    require(
        "mask_shifted" in predictions,
        "model",
        "a model that predicts masks",
        ", ".join(predictions),
        "train with the objective Hybrid, Masked or BlockMasked",
    )
    return 1


def _predict(model: LanguageModel, rows: list[list[int]], read_at: int, mask: int) -> Float[Tensor, "row vocab"]:
    """Return the distributions read at one position of each text, in float64."""
    tokens = torch.tensor(rows)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if model.traits.attention == "causal":  # known tokens first, then the masks, both in text order
        sequence = (tokens == mask).long().argsort(dim=1, stable=True)
        tokens, positions = tokens.gather(1, sequence), positions.gather(1, sequence)
    order = _order(model.traits, positions)
    visible = order[:, None, :] <= order[:, :, None]
    device = model.device
    hidden = model.hidden_states(tokens.to(device), positions.to(device), visible.to(device))
    index = (positions == read_at).long().argmax(dim=1)
    logits = model.logits(hidden[torch.arange(len(rows), device=device), index.to(device)])
    return logits.double().softmax(-1).cpu()


def _order(traits: ModelTraits, positions: Int[Tensor, "row token"]) -> Int[Tensor, "row token"]:
    """Return the order of tokens under the model's attention pattern: a token sees the same or lower orders."""
    if traits.attention == "bidirectional":
        return torch.zeros_like(positions)
    if traits.attention == "block_causal":
        assert traits.block_size is not None
        return positions // traits.block_size
    return torch.arange(positions.shape[1]).expand_as(positions)
