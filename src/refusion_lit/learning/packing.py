"""Packing: the corrupted samples of a row one after the other, invisible to one another."""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch


def pack(corrupted: CorruptedBatch, rows: Int[Tensor, " sample"], *, pad_token_id: int) -> CorruptedBatch:
    """Lay a corrupted batch out again, with the samples of a row one after the other.

    Samples are corrupted one to a row and packed afterwards, so packing changes no corruption and needs nothing from
    an objective but :attr:`CorruptedBatch.is_real`. Tokens keep their position ids, which restart with every sample,
    and their labels, weights and terms: the loss is that of the batch without packing.

    Args:
        corrupted: One sample per row, view-major if there are several views.
        rows: Row that each sample goes to, from 0 without gaps. Each view gets rows of its own, view-major again.
        pad_token_id: Fills up the rows, which become as long as the fullest.

    Raises:
        ValueError: If the batch does not say which of its positions are real.
    """
    if corrupted.is_real is None:
        raise ValueError(
            "data.pack_length: expected an objective that supports packing, got one that does not say which tokens are "
            "padding (CorruptedBatch.is_real); set data.pack_length to null."
        )
    num_views = corrupted.num_views
    num_rows = int(rows.max()) + 1
    is_real = rearrange(corrupted.is_real, "(view sample) token -> view sample token", view=num_views)

    lengths = is_real.sum(-1)
    is_same_row = rows[:, None] == rows
    starts = (is_same_row.tril(-1) * lengths[:, None]).sum(-1)
    width = int((starts + lengths).max())
    first_rows = torch.arange(num_views, device=rows.device)[:, None] * num_rows
    targets = ((first_rows + rows) * width + starts)[..., None] + is_real.cumsum(-1) - 1
    # Index into the flattened batch of each packed position's token, -1 for padding. Tokens that are not real go to
    # one extra entry that is cut off: selecting the real ones first would wait for the device.
    size = num_views * num_rows * width
    source = torch.full((size + 1,), -1, device=rows.device)
    source.scatter_(0, targets.masked_fill(~is_real, size).flatten(), torch.arange(is_real.numel(), device=rows.device))
    source = rearrange(source[:-1], "(row token) -> row token", token=width)

    def taken(values: Tensor, fill: int | float) -> Tensor:
        return values.flatten()[source.clamp(min=0)].masked_fill(source < 0, fill)

    return replace(
        corrupted,
        input_ids=taken(corrupted.input_ids, pad_token_id),
        position_ids=taken(corrupted.position_ids, 0),
        labels=taken(corrupted.labels, IGNORE_INDEX),
        weights=taken(corrupted.weights, 0.0),
        terms=taken(corrupted.terms, 0),
        is_masked=None if corrupted.is_masked is None else taken(corrupted.is_masked, False),
        is_real=source >= 0,
        draft_offsets=None if corrupted.draft_offsets is None else taken(corrupted.draft_offsets, -1),
        visible=_packed_ranges(corrupted.visible, corrupted.is_real, starts.flatten(), source),
    )


def _packed_ranges(
    visible: Int[Tensor, "sample token range 2"] | None,
    is_real: Bool[Tensor, "sample token"],
    starts: Int[Tensor, " sample"],
    source: Int[Tensor, "row packed"],
) -> Int[Tensor, "row packed range 2"]:
    """Let a token see what it saw in its own sample; padding sees itself.

    Args:
        visible: What tokens saw before packing; ``None`` for causal.
        is_real: Positions that are packed.
        starts: First index of each sample in its packed row.
        source: Index of each packed token in the flattened batch, -1 for padding.
    """
    width = is_real.shape[1]
    index = torch.arange(width, device=source.device)
    if visible is None:
        causal = torch.stack((torch.zeros_like(index), index + 1), -1)
        visible = repeat(causal, "token bound -> sample token 1 bound", sample=len(is_real))
    num_before = F.pad(is_real.cumsum(-1), (1, 0))  # of real tokens: a bound moves by those that are left out before it
    bounds = rearrange(visible, "sample token range bound -> sample (token range bound)")
    moved = starts[:, None] + num_before.gather(1, bounds)
    moved = rearrange(moved.view_as(visible), "sample token range bound -> (sample token) range bound")
    place = torch.arange(source.shape[1], device=source.device)
    itself = F.pad(torch.stack((place, place + 1), -1)[:, None], (0, 0, 0, visible.shape[2] - 1))
    return torch.where(source[..., None, None] < 0, itself, moved[source.clamp(min=0)])
