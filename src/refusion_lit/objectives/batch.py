"""The values of a training step: a clean batch, what an objective makes of it, and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target."""


@dataclass(kw_only=True)
class ResponseBatch:
    """A clean training batch: prompts and responses, padded on the right.

    Attributes:
        input_ids: Prompt, then response with its end-of-sequence token, then padding.
        prompt_lengths: Number of prompt tokens of each row.
        response_lengths: Number of response tokens of each row, end of sequence included; at least 1.
        sample_keys: Stable 64-bit key of each sample (a hash of its id); noise depends on it alone.
        ids: The samples' ids.
        rows: Row of each sample, from 0 without gaps, when several samples are to share a row in the forward pass;
            ``None``: a row for each.
        following: On the first batch of an optimizer step the step's other batches, over which gradients are
            accumulated; ``None`` elsewhere.
    """

    input_ids: Int[Tensor, "batch token"]
    prompt_lengths: Int[Tensor, " batch"]
    response_lengths: Int[Tensor, " batch"]
    sample_keys: Int[Tensor, " batch"]
    ids: list[str] = field(default_factory=list)
    rows: Int[Tensor, " batch"] | None = None
    following: tuple[ResponseBatch, ...] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ResponseBatch:
        """Return the batch on a device."""
        return _moved(self, device, non_blocking)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of the batch, padding excluded."""
        return int((self.prompt_lengths + self.response_lengths).sum())


@dataclass(kw_only=True)
class CorruptedBatch:
    """What an objective hands to the backbone, and what it expects back.

    Each labelled position belongs to one term of the loss and has a weight in that term's sum.

    Attributes:
        input_ids: Tokens in sequence order (which need not be text order).
        position_ids: Place of each token in the final text.
        labels: Target of each position's logits, or ``IGNORE_INDEX``. No further shift is applied.
        weights: Weight of each position's cross-entropy in its term's sum; used where labelled.
        terms: Index into ``term_names`` of each labelled position.
        term_names: The loss terms, in order, e.g. ``("ar", "mdm")``.
        counts: What each term's sum is divided by (tokens or samples).
        coefficients: Factor of each term in the total loss.
        attention_mask: ``True`` where a query may see a key; ``None`` means plain causal attention
            over the sequence with padding on the right.
        is_masked: Which positions hold the mask token by corruption.
        is_real: Which positions hold something of a sample and not mere padding; ``None`` where an objective does
            not say, whose samples cannot be packed.
    """

    input_ids: Int[Tensor, "batch token"]
    position_ids: Int[Tensor, "batch token"]
    labels: Int[Tensor, "batch token"]
    weights: Float[Tensor, "batch token"]
    terms: Int[Tensor, "batch token"]
    term_names: tuple[str, ...]
    counts: Float[Tensor, " term"]
    coefficients: tuple[float, ...]
    attention_mask: Bool[Tensor, "batch token token"] | None = None
    is_masked: Bool[Tensor, "batch token"] | None = None
    is_real: Bool[Tensor, "batch token"] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CorruptedBatch:
        """Return the batch on a device."""
        return _moved(self, device, non_blocking)


@dataclass(kw_only=True)
class LossOutput:
    """A loss as sums and counts, so that means over micro-batches and processes stay exact.

    Attributes:
        sums: Weighted sum of cross-entropies for each term, in nats.
        counts: What each sum is divided by.
        coefficients: Factor of each term in the total.
        names: The terms' names, in order.
    """

    sums: Float[Tensor, " term"]
    counts: Float[Tensor, " term"]
    coefficients: tuple[float, ...]
    names: tuple[str, ...]

    @property
    def means(self) -> Float[Tensor, " term"]:
        """Each term's mean; zero, not NaN, where a term has no targets."""
        empty = self.counts == 0
        return torch.where(empty, torch.zeros_like(self.sums), self.sums / self.counts.masked_fill(empty, 1.0))

    @property
    def total(self) -> Float[Tensor, ""]:
        """The loss to minimise: the coefficients times the means, summed."""
        return (self.means * self.means.new_tensor(self.coefficients)).sum()

    def named_means(self) -> dict[str, Tensor]:
        """Return each term's detached mean by name."""
        return dict(zip(self.names, self.means.detach().unbind(), strict=True))


def _moved(batch: Any, device: torch.device | str, non_blocking: bool) -> Any:  # noqa: ANN401 - any of our batches
    tensors = {
        f.name: value.to(device, non_blocking=non_blocking)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor)
    }
    return replace(batch, **tensors)
