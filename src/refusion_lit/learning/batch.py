"""A training step's values: the clean batch, the corrupted batch and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.noise import stable_key

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
    """A clean micro-batch: prompts with responses, padded on the right.

    Attributes:
        input_ids: Prompt, then response with its EOS token, then padding.
        prompt_lengths: Number of prompt tokens per sample.
        response_lengths: Number of response tokens per sample, EOS token included; at least 1.
        sample_keys: 64-bit hashes of the samples' ids. They key the noise.
        ids: The samples' ids.
        rows: For packing: the samples' row indices, from 0 without gaps. ``None``: a row per sample.

    Examples:
        >>> batch = ResponseBatch.from_pairs([([5, 6], [7, 1]), ([8], [1])])
        >>> batch.input_ids.tolist()
        [[5, 6, 7, 1], [8, 1, 0, 0]]
        >>> batch.in_response.tolist()
        [[False, False, True, True], [False, True, False, False]]
    """

    input_ids: Int[Tensor, "batch token"]
    prompt_lengths: Int[Tensor, " batch"]
    response_lengths: Int[Tensor, " batch"]
    sample_keys: Int[Tensor, " batch"]
    ids: list[str] = field(default_factory=list)
    rows: Int[Tensor, " batch"] | None = None

    @classmethod
    def from_pairs(
        cls,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        ids: Sequence[str] | None = None,
        pad_token_id: int = 0,
    ) -> Self:
        """Make a batch from token ids; no pairs give an empty batch.

        Args:
            pairs: Prompt and response of every sample, EOS token included.
            ids: The samples' ids, which key the noise. ``None``: the numbers 0, 1, 2, ... are the keys.
            pad_token_id: The padding token.
        """
        texts = [[*prompt, *response] for prompt, response in pairs]
        width = max(map(len, texts), default=0)
        padded = [text + [pad_token_id] * (width - len(text)) for text in texts]
        keys = range(len(pairs)) if ids is None else [stable_key(sample_id) for sample_id in ids]
        return cls(
            input_ids=torch.tensor(padded, dtype=torch.long).reshape(len(pairs), width),
            prompt_lengths=torch.tensor([len(prompt) for prompt, _ in pairs], dtype=torch.long),
            response_lengths=torch.tensor([len(response) for _, response in pairs], dtype=torch.long),
            sample_keys=torch.tensor(keys, dtype=torch.long),
            ids=list(ids or ()),
        )

    @property
    def positions(self) -> Int[Tensor, " token"]:
        """The positions 0, 1, 2, ... in a row."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)

    @property
    def ends(self) -> Int[Tensor, " batch"]:
        """Number of tokens per sample, equal to the position after the last token."""
        return self.prompt_lengths + self.response_lengths

    @property
    def is_real(self) -> Bool[Tensor, "batch token"]:
        """Mask of positions with a token instead of padding."""
        return self.positions < self.ends[:, None]

    @property
    def in_response(self) -> Bool[Tensor, "batch token"]:
        """Which positions hold a response token."""
        return self.is_real & (self.positions >= self.prompt_lengths[:, None])

    @property
    def bidirectional(self) -> Int[Tensor, "batch token range 2"]:
        """Value of ``CorruptedBatch.visible`` for bidirectional attention: every token, padding too, sees its text."""
        everything = torch.stack((torch.zeros_like(self.ends), self.ends), -1)
        return repeat(everything, "batch bound -> batch token 1 bound", token=self.input_ids.shape[1])


@dataclass(kw_only=True)
class CorruptedBatch(_Movable):
    """The model's inputs and targets for a micro-batch.

    A labelled position belongs to a term of the loss and has a weight in the term's sum.

    The ``batch`` axis of all tensors is ``(view sample)``, view-major: row ``view * num_samples + sample`` shows the
    sample in the view. :func:`~refusion_lit.learning.packing.pack` relies on this order.

    Attributes:
        input_ids: Tokens in sequence order, which need not be text order.
        position_ids: The tokens' positions in the text.
        labels: The logits' targets, or ``IGNORE_INDEX``. No further shift is applied.
        weights: Weights of the cross-entropies in the sums of their terms.
        terms: Indices into :attr:`Objective.terms`, by labelled position.
        counts: Denominators (numbers of tokens or samples), by term.
        visible: What a token sees: the union of its ranges ``(start, stop)`` of sequence indices. Unused ranges are
            empty. ``None``: causal attention over the sequence, padding on the right. For bidirectional attention:
            :attr:`ResponseBatch.bidirectional`.
        is_masked: Positions that corruption replaced by the mask token.
        is_real: Positions that hold tokens and not padding. ``None``: unknown; the batch cannot be packed.
        num_views: Number of views per sample.
        rejected: Rejected tokens by position, or ``IGNORE_INDEX``, for objectives that compare two texts. The batch
            then cannot be packed.
        num_drafts: Number of draft masks at the end of a row. They run in a second pass with the model's drafter
            (:meth:`~refusion_lit.modeling.backbone.Backbone.forward`).
        num_canvas: Number of canvas tokens at the end of a row. A model with a separate decoder for canvases computes
            them with this decoder, after the text.
        is_conditioned: With a canvas: rows whose first prediction conditions a second pass of the canvas decoder.
        draft_offsets: The masks' offsets in their slot, -1 at other tokens; a decoder drafts a slot at once. A slot's
            masks are consecutive. ``None``: the objective trains no slots.
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
    num_canvas: int = 0
    is_conditioned: Bool[Tensor, " batch"] | None = None
    draft_offsets: Int[Tensor, "batch token"] | None = None


@dataclass(kw_only=True)
class LossOutput:
    """A loss as sums and counts, so that means over micro-batches and processes stay exact.

    Attributes:
        sums: Weighted sums of cross-entropies, by term, in nats.
        counts: Denominators, by term.
        terms: Coefficients in the total, by the terms' names, in order.
        draft_counts: Counts of masks that would be accepted as drafts, only without gradients; see
            :func:`~refusion_lit.learning.draft_figures.draft_figures`.

    Examples:
        >>> terms = {"a": 1.0, "b": 0.5}
        >>> LossOutput(sums=torch.tensor([6.0, 1.0]), counts=torch.tensor([3.0, 0.0]), terms=terms).total.item()
        2.0
    """

    sums: Float[Tensor, " term"]
    counts: Float[Tensor, " term"]
    terms: Mapping[str, float]
    draft_counts: Float[Tensor, "offset figure"] | None = None

    @property
    def means(self) -> Float[Tensor, " term"]:
        """Means by term; zero, not NaN, for a term without targets."""
        empty = self.counts == 0
        return torch.where(empty, torch.zeros_like(self.sums), self.sums / self.counts.masked_fill(empty, 1.0))

    @property
    def total(self) -> Float[Tensor, ""]:
        """The loss to minimise: the means, weighted by their coefficients."""
        return (self.means * self.means.new_tensor(list(self.terms.values()))).sum()

    def named_means(self) -> dict[str, Tensor]:
        """Return the detached means by the terms' names."""
        return dict(zip(self.terms, self.means.detach().unbind(), strict=True))
