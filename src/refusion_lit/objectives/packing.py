"""Several corrupted samples in one row, none of which sees another."""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor

from refusion_lit.objectives.batch import IGNORE_INDEX, CorruptedBatch


def pack(corrupted: CorruptedBatch, rows: Int[Tensor, " sample"], *, pad_token_id: int) -> CorruptedBatch:
    """Lay a corrupted batch out anew, with the samples of a row one behind the other.

    Samples are corrupted one to a row and packed afterwards, so packing changes no corruption and needs nothing of an
    objective but :attr:`CorruptedBatch.is_real`. Tokens keep their position ids, which restart with every sample, and
    their labels, weights and terms: the loss is that of the batch without packing.

    Args:
        corrupted: One sample a row; with several views of the batch, view by view.
        rows: Number of the packed row of each sample. Views of a row become rows of their own.
        pad_token_id: Fills up the rows, which become as long as the fullest.

    Raises:
        ValueError: If the batch does not say which of its positions are real.
    """
    if corrupted.is_real is None:
        raise ValueError(
            "data.pack_length: expected an objective that says which positions are real (CorruptedBatch.is_real), "
            "got one that does not; set pack_length to null, or let its corrupt() fill in is_real."
        )
    is_real = corrupted.is_real
    num_rows, num_views = int(rows.max()) + 1, len(is_real) // len(rows)
    rows = torch.cat([rows + view * num_rows for view in range(num_views)])
    num_rows *= num_views

    lengths = is_real.sum(1)
    is_same_row = rows[:, None] == rows
    starts = (is_same_row.tril(-1) * lengths).sum(1)
    width = int((starts + lengths).max())
    targets = (rows * width + starts)[:, None] + is_real.cumsum(1) - 1
    # Where each packed place comes from: an index into the flattened batch, -1 for padding. What is not real lands in
    # one place more, which is cut off; selecting it first would wait for the device.
    source = torch.full((num_rows * width + 1,), -1, device=rows.device)
    source.scatter_(
        0,
        targets.masked_fill(~is_real, num_rows * width).flatten(),
        torch.arange(is_real.numel(), device=rows.device),
    )
    source = rearrange(source[:-1], "(row token) -> row token", row=num_rows)

    def taken(values: Tensor, fill: float) -> Tensor:
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
        attention_mask=_packed_mask(corrupted.attention_mask, source, width=is_real.shape[1]),
    )


def _packed_mask(
    mask: Bool[Tensor, "sample token token"] | None, source: Int[Tensor, "row packed"], *, width: int
) -> Bool[Tensor, "row packed packed"]:
    """Let a token see what it saw in its own sample, and padding itself.

    Args:
        mask: Attention before packing; ``None`` for causal.
        source: Index of each packed token in the flattened batch, -1 for padding.
        width: Tokens a sample in the batch before packing.
    """
    sample, place = source // width, source % width  # padding: sample -1
    allowed = (sample[:, :, None] == sample[:, None]) & (source >= 0)[:, None]
    if mask is None:
        allowed = allowed.tril()
    else:
        seen = mask[sample.clamp(min=0), place]
        allowed &= seen.gather(2, place[:, None].expand(-1, place.shape[1], -1))
    return allowed | torch.eye(source.shape[1], dtype=torch.bool, device=source.device)
