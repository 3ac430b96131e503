"""The interface of a training objective: how a clean batch is corrupted, and what the model predicts from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.cross_entropy import Head, chunked_cross_entropy
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require, require_at_least

MaskRatio = Float[Tensor, " batch"] | None
"""Given mask probabilities of a batch's rows, in (0, 1]; ``None``: they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A way to train a language model on prompts with responses.

    An objective is one file: its options, :attr:`traits`, :attr:`terms` and :meth:`corrupt`. The loss is shared.

    Attributes:
        chunk_size: Number of labelled positions whose logits are in memory at once, at least 1; ``None``: the largest
            number that fits in 64 MB. Changes memory and speed, not the loss.

    Class attributes:
        term: Name of the only loss term; objectives with several override :attr:`terms`.
    """

    term: ClassVar[str] = "loss"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Check the options; subclasses extend it."""
        require_at_least("objective.chunk_size", self.chunk_size, 1, optional=True)

    @property
    @abstractmethod
    def traits(self) -> ModelTraits:
        """What a model trained with this objective can do: its attention pattern and the meaning of its logits."""

    @property
    def terms(self) -> Mapping[str, float]:
        """The loss terms: each one's coefficient in the total by its name, in order; by default ``term`` alone."""
        return {self.term: 1.0}

    def at(self, progress: float) -> Objective:  # noqa: ARG002
        """Return the objective as it is at a point of training: itself, where no option changes in the course of it.

        Args:
            progress: Share of all optimizer steps that are done, from 0.
        """
        return self

    @abstractmethod
    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: MaskRatio = None,
    ) -> CorruptedBatch:
        """Mask part of the responses and label what is to be predicted.

        A sample's corruption depends on the sample and its noise only, not on the rest of the batch, the padding or
        the device. ``noise`` is the only source of randomness.

        Args:
            batch: Clean prompts and responses.
            noise: The samples' noise, one row each.
            special_tokens: Ids of the tokenizer's special tokens.
            mask_ratio: Probability in (0, 1] with which each row's tokens or slots are masked, instead of a random
                one. Validation passes fixed ratios, so that its curves are comparable between runs.

        Raises:
            ValueError: If the objective needs a mask token and there is none, or a ratio is out of range.
        """

    @property
    def distills(self) -> bool:
        """Whether the targets are predictions of the model without its low-rank adapters (``backbone.lora``)."""
        return False

    def loss(
        self,
        hidden: Float[Tensor, "batch token hidden"],
        head: Head,
        corrupted: CorruptedBatch,
        teacher: Float[Tensor, "batch token hidden"] | None = None,
    ) -> LossOutput:
        """Compute the loss from the backbone's outputs.

        Args:
            hidden: Hidden states of ``corrupted``, in its order.
            head: Maps hidden states ``[token, hidden]`` to logits ``[token, vocab]``.
            corrupted: What :meth:`corrupt` returned, on the device of ``hidden``.
            teacher: Hidden states whose predictions are the targets instead of the labels.
        """
        sums = chunked_cross_entropy(
            hidden,
            head,
            corrupted.labels,
            corrupted.weights,
            corrupted.terms,
            num_terms=len(corrupted.counts),
            teacher=teacher,
            chunk_size=self.chunk_size,
        )
        return LossOutput(sums=sums, counts=corrupted.counts.to(sums.dtype), terms=self.terms)


def required_mask_id(objective: Objective, special_tokens: SpecialTokens) -> int:
    """Return the id of the mask token.

    Raises:
        ValueError: If the model has no mask token.
    """
    if special_tokens.mask_token_id is None:
        raise ValueError(
            f"mask_token_id: expected a mask token for the objective {type(objective).__name__}, got none. "
            "Let the backbone add one, or train with the objective Autoregressive."
        )
    return special_tokens.mask_token_id


def mask_probability(noise: KeyedNoise, eps: float, mask_ratio: MaskRatio) -> Float[Tensor, " batch"]:
    """Return each row's mask probability: ``(1 - eps) t + eps`` with t uniform in [0, 1), or the given ratio.

    Raises:
        ValueError: If a given ratio is outside (0, 1].
    """
    if mask_ratio is None:
        return (1 - eps) * noise.uniform("mask_ratio", 1)[:, 0] + eps
    in_range = bool(((mask_ratio > 0) & (mask_ratio <= 1)).all())
    require(in_range, "mask_ratio", "values in (0, 1]", mask_ratio.tolist(), "pass ratios in that range")
    return mask_ratio.double()


def random_subset(
    order: Int[Tensor, "*rows place"], candidates: Bool[Tensor, "*rows place"], count: Shaped[Tensor, "*rows"]
) -> Bool[Tensor, "*rows place"]:
    """Choose exactly ``count`` candidates along the last axis, or all if there are fewer.

    Args:
        order: Random integers from :meth:`KeyedNoise.bits`; the candidates with the lowest ones are chosen.
        candidates: Places that may be chosen.
        count: Number of candidates to choose in each row.
    """
    ranks = order.where(candidates, 2**53).argsort(dim=-1, stable=True).argsort(dim=-1)  # bits stay below 2**53
    return candidates & (ranks < count[..., None])


def response_positions(batch: ResponseBatch) -> tuple[Int[Tensor, " token"], Bool[Tensor, "batch token"]]:
    """Return the positions 0, 1, 2, ... of a batch's tokens, and a mask of those that belong to a response."""
    positions = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    ends = batch.prompt_lengths + batch.response_lengths
    return positions, (positions >= batch.prompt_lengths[:, None]) & (positions < ends[:, None])
