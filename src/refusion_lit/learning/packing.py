"""Packing: corrupted samples share a row without seeing each other; positions that no target needs are dropped."""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch


def pack(corrupted: CorruptedBatch, rows: Int[Tensor, " sample"], *, pad_token_id: int) -> CorruptedBatch:
    """Concatenate the samples that share a row.

    Samples are packed after corruption, so packing does not change corruption, and an objective only has to set
    :attr:`CorruptedBatch.is_real`. Tokens keep their labels, weights, terms and position ids, which restart with every
    sample. Packing therefore does not change the loss.

    Args:
        corrupted: A sample per row, view-major if there are several views.
        rows: Row indices by sample, from 0 without gaps. Views never share a row; rows are view-major again.
        pad_token_id: Fills up the rows to the fullest row's length.

    Raises:
        ValueError: If ``corrupted.is_real`` is missing.

    Examples:
        >>> ids = torch.tensor([[5, 6, 1], [7, 1, 0]])
        >>> positions = torch.arange(3).expand(2, -1)
        >>> batch = CorruptedBatch(
        ...     input_ids=ids, position_ids=positions, labels=ids, weights=ids.double(), terms=torch.zeros_like(ids),
        ...     counts=torch.tensor([5.0]), is_real=ids > 0,
        ... )
        >>> packed = pack(batch, torch.tensor([0, 0]), pad_token_id=0)
        >>> packed.input_ids.tolist(), packed.position_ids.tolist()
        ([[5, 6, 1, 7, 1]], [[0, 1, 2, 0, 1]])
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
    # Indices into the flattened batch by packed position, -1 for padding. Padding of the batch goes to an extra entry
    # that is cut off, because selecting the real tokens first would wait for the device.
    size = num_views * num_rows * width
    source = torch.full((size + 1,), -1, device=rows.device)
    source.scatter_(0, targets.masked_fill(~is_real, size).flatten(), torch.arange(is_real.numel(), device=rows.device))
    source = rearrange(source[:-1], "(row token) -> row token", token=width)

    def gather(values: Tensor, fill: int | float) -> Tensor:
        return values.flatten()[source.clamp(min=0)].masked_fill(source < 0, fill)

    return replace(
        corrupted,
        input_ids=gather(corrupted.input_ids, pad_token_id),
        position_ids=gather(corrupted.position_ids, 0),
        labels=gather(corrupted.labels, IGNORE_INDEX),
        weights=gather(corrupted.weights, 0.0),
        terms=gather(corrupted.terms, 0),
        is_masked=None if corrupted.is_masked is None else gather(corrupted.is_masked, False),
        is_real=source >= 0,
        draft_offsets=None if corrupted.draft_offsets is None else gather(corrupted.draft_offsets, -1),
        visible=_packed_ranges(corrupted.visible, corrupted.is_real, starts.flatten(), source),
    )


def lay_out(corrupted: CorruptedBatch, rows: Int[Tensor, " sample"] | None, *, pad_token_id: int) -> CorruptedBatch:
    """Pack samples into rows and drop positions that no target needs. Loss and gradients do not change.

    In block diffusion's doubled sequence, no target needs the prompt's noisy copy and the last clean block.

    All positions are kept in causal batches, in batches with rejected tokens, draft masks or a canvas, and in
    subclasses, whose fields may belong to positions.

    Args:
        corrupted: A batch.
        rows: Row indices by sample, as in :func:`pack`; ``None``: a row per sample. The batch then stays as it is if
            no row becomes shorter.
        pad_token_id: Fills up the rows to the longest row's length.

    Raises:
        ValueError: If samples are to share rows, but ``corrupted.is_real`` is missing.

    Examples:
        >>> from refusion_lit.noise import KeyedNoise
        >>> from refusion_lit.objectives import BlockMasked
        >>> from refusion_lit.learning.batch import ResponseBatch
        >>> from refusion_lit.types import SpecialTokens
        >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
        >>> batch = ResponseBatch.from_pairs([([5, 6], [7, 8])])
        >>> noise = KeyedNoise(batch.sample_keys)
        >>> corrupted = BlockMasked(block_size=2).corrupt(batch, noise, special, mask_ratio=torch.ones(1))
        >>> corrupted.input_ids.tolist(), lay_out(corrupted, None, pad_token_id=0).input_ids.tolist()
        ([[5, 6, 2, 2, 5, 6, 7, 8]], [[2, 2, 5, 6]])
    """
    has_more = bool(corrupted.num_drafts or corrupted.num_canvas) or corrupted.rejected is not None
    is_plain = type(corrupted) is CorruptedBatch and corrupted.is_real is not None and not has_more
    needed = _needed_positions(corrupted) if is_plain and corrupted.visible is not None else None
    if rows is None:
        if needed is None or int(needed.sum(1).max()) == needed.shape[1]:
            return corrupted
        rows = torch.arange(len(needed) // corrupted.num_views, device=needed.device)
    return pack(corrupted if needed is None else replace(corrupted, is_real=needed), rows, pad_token_id=pad_token_id)


def _needed_positions(corrupted: CorruptedBatch) -> Bool[Tensor, "row token"]:
    """Return which positions are needed: positions with labels, and positions that they see, directly or indirectly."""
    assert corrupted.visible is not None
    needed = corrupted.labels != IGNORE_INDEX
    needed[:, 0] |= ~needed.any(1)  # a row without labels keeps a position, because no row may be empty
    starts, stops = corrupted.visible.unbind(-1)
    stops = stops.maximum(starts)
    edges = needed.new_zeros((len(needed), needed.shape[1] + 1), dtype=torch.long)
    while True:
        is_needed = needed[..., None].expand_as(starts).flatten(1).long()
        changes = edges.scatter_add(1, starts.flatten(1), is_needed).scatter_add(1, stops.flatten(1), -is_needed)
        seen = needed | (changes.cumsum(1)[:, :-1] > 0)
        if torch.equal(seen, needed):
            return needed
        needed = seen


def _packed_ranges(
    visible: Int[Tensor, "sample token range 2"] | None,
    is_real: Bool[Tensor, "sample token"],
    starts: Int[Tensor, " sample"],
    source: Int[Tensor, "row packed"],
) -> Int[Tensor, "row packed range 2"]:
    """Return the packed tokens' visible ranges: a token sees the same tokens as before, padding sees itself.

    Args:
        visible: Visible ranges before packing; ``None`` for causal attention.
        is_real: Positions that are packed.
        starts: The samples' first indices in their packed rows.
        source: The packed tokens' indices in the flattened batch, -1 for padding.
    """
    width = is_real.shape[1]
    index = torch.arange(width, device=source.device)
    if visible is None:
        causal = torch.stack((torch.zeros_like(index), index + 1), -1)
        visible = repeat(causal, "token bound -> sample token 1 bound", sample=len(is_real))
    num_before = F.pad(is_real.cumsum(-1), (1, 0))  # of real tokens: a bound moves by the padding before it
    bounds = rearrange(visible, "sample token range bound -> sample (token range bound)")
    moved = starts[:, None] + num_before.gather(1, bounds)
    moved = rearrange(moved.view_as(visible), "sample token range bound -> (sample token) range bound")
    place = torch.arange(source.shape[1], device=source.device)
    itself = F.pad(torch.stack((place, place + 1), -1)[:, None], (0, 0, 0, visible.shape[2] - 1))
    return torch.where(source[..., None, None] < 0, itself, moved[source.clamp(min=0)])
