"""The values of a training step: a clean batch, the corrupted batch made of it, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target."""


class _Movable:
    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on a device."""
        tensors = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)  # type: ignore[arg-type] - a dataclass
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)  # type: ignore[type-var]


@dataclass(kw_only=True)
class ResponseBatch(_Movable):
    """A clean micro-batch of prompts with responses, padded on the right.

    Attributes:
        input_ids: Prompt, then response with its end-of-sequence token, then padding.
        prompt_lengths: Number of prompt tokens of each sample.
        response_lengths: Number of response tokens of each sample, EOS token included; at least 1.
        sample_keys: 64-bit hash of each sample's id; keys the sample's noise.
        ids: The samples' ids.
        rows: For packing: index of the row that each sample goes to, from 0 without gaps. ``None``: one sample per row.
    """

    input_ids: Int[Tensor, "batch token"]
    prompt_lengths: Int[Tensor, " batch"]
    response_lengths: Int[Tensor, " batch"]
    sample_keys: Int[Tensor, " batch"]
    ids: list[str] = field(default_factory=list)
    rows: Int[Tensor, " batch"] | None = None

    @property
    def positions(self) -> Int[Tensor, " token"]:
        """The positions 0, 1, 2, ... of a row's tokens."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)

    @property
    def ends(self) -> Int[Tensor, " batch"]:
        """Position after each sample's last token: the number of its tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def is_real(self) -> Bool[Tensor, "batch token"]:
        """Which positions hold a token of the sample rather than padding."""
        return self.positions < self.ends[:, None]

    @property
    def in_response(self) -> Bool[Tensor, "batch token"]:
        """Which positions hold a response token."""
        return self.is_real & (self.positions >= self.prompt_lengths[:, None])

    @property
    def bidirectional(self) -> Int[Tensor, "batch token range 2"]:
        """Bidirectional attention, for ``CorruptedBatch.visible``: every token, padding too, sees all of its text."""
        everything = torch.stack((torch.zeros_like(self.ends), self.ends), -1)
        return repeat(everything, "batch bound -> batch token 1 bound", token=self.input_ids.shape[1])


@dataclass(kw_only=True)
class CorruptedBatch(_Movable):
    """The model's inputs and targets for one micro-batch.

    Each labelled position belongs to one term of the loss and has a weight in that term's sum.

    The ``batch`` axis of all tensors is ``(view sample)``, view-major: row ``view * num_samples + sample`` shows that
    sample in that view. :func:`~refusion_lit.learning.packing.pack` relies on it.

    Attributes:
        input_ids: Tokens in sequence order, which need not be text order.
        position_ids: Position of each token in the text.
        labels: Target of the logits at each position, or ``IGNORE_INDEX``. No further shift is applied.
        weights: Weight of each labelled position's cross-entropy in its term's sum.
        terms: Index of each labelled position's term in :attr:`Objective.terms`.
        counts: Denominator of each term's sum (tokens or samples).
        visible: Ranges ``(start, stop)`` of the sequence's tokens that together are what each token sees; unused ones
            are empty. ``None``: causal attention over the sequence, padding on the right. For bidirectional attention:
            :attr:`ResponseBatch.bidirectional`.
        is_masked: Positions that corruption replaced by the mask token.
        is_real: Positions that hold a sample's tokens rather than padding. ``None``: the objective does not say, and
            its samples cannot be packed.
        num_views: Number of views of each sample.
        rejected: Token that each position should rather not predict, or ``IGNORE_INDEX``; for objectives that compare
            two texts. Such batches cannot be packed.
        num_drafts: The last tokens of each row are this many draft masks, which run in a second pass with the model's
            drafter (:meth:`~refusion_lit.modeling.backbone.Backbone.forward`).
        draft_offsets: Offset of each mask in the slot that a decoder drafts at once, -1 at other tokens. A slot's masks
            stand one after the other. ``None``: the objective trains no such slots.
    """

    input_ids: Int[Tensor, "batch token"]
    position_ids: Int[Tensor, "batch token"]
    labels: Int[Tensor, "batch token"]
    weights: Float[Tensor, "batch token"]
    terms: Int[Tensor, "batch token"]
    counts: Float[Tensor, " term"]
    visible: Int[Tensor, "batch token range 2"] | None = None
    is_masked: Bool[Tensor, "batch token"] | None = None
    is_real: Bool[Tensor, "batch token"] | None = None
    num_views: int = 1
    rejected: Int[Tensor, "batch token"] | None = None
    num_drafts: int = 0
    draft_offsets: Int[Tensor, "batch token"] | None = None


@dataclass(kw_only=True)
class LossOutput:
    """A loss as sums and counts, so that means over micro-batches and processes stay exact.

    Attributes:
        sums: Weighted sum of each term's cross-entropies, in nats.
        counts: Denominator of each sum.
        terms: Coefficient of each term in the total, by the term's name, in order.
        draft_counts: Which masks would be accepted as drafts, without gradients only; see
            :func:`~refusion_lit.learning.draft_figures.draft_figures`.
    """

    sums: Float[Tensor, " term"]
    counts: Float[Tensor, " term"]
    terms: Mapping[str, float]
    draft_counts: Float[Tensor, "offset figure"] | None = None

    @property
    def means(self) -> Float[Tensor, " term"]:
        """Mean of each term; zero, not NaN, for a term without targets."""
        empty = self.counts == 0
        return torch.where(empty, torch.zeros_like(self.sums), self.sums / self.counts.masked_fill(empty, 1.0))

    @property
    def total(self) -> Float[Tensor, ""]:
        """The loss to minimise: the sum of the means times their coefficients."""
        return (self.means * self.means.new_tensor(list(self.terms.values()))).sum()

    def named_means(self) -> dict[str, Tensor]:
        """Return each term's detached mean by name."""
        return dict(zip(self.terms, self.means.detach().unbind(), strict=True))
