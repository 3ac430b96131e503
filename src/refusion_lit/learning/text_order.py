"""Helpers for objectives: random subsets of places, and changes to batches in text order."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.types import SpecialTokens


def extend_responses(
    batch: ResponseBatch,
    lengths: Int[Tensor, " batch"],
    special_tokens: SpecialTokens,
    *,
    token_id: int | None = None,
    width: int | None = None,
) -> ResponseBatch:
    """Append copies of a token to responses, and pad the batch to its longest row.

    Args:
        batch: A clean batch.
        lengths: New response lengths, none below the old length.
        special_tokens: The tokenizer's special ids.
        token_id: The appended token; ``None``: the EOS token.
        width: The longest row's length if it is known; ``None``: read it from the device, which waits.
    """
    ends = batch.prompt_lengths + lengths
    new_width = int(ends.max().cpu()) if width is None else width
    added = max(0, new_width - batch.input_ids.shape[1])
    input_ids = F.pad(batch.input_ids, (0, added), value=special_tokens.pad_token_id)[:, :new_width]
    positions = torch.arange(new_width, device=input_ids.device)
    is_new = (positions >= batch.ends[:, None]) & (positions < ends[:, None])
    token_id = special_tokens.eos_token_ids[0] if token_id is None else token_id
    return replace(batch, input_ids=input_ids.masked_fill(is_new, token_id), response_lengths=lengths)


def shift_left(values: Tensor, fill: int | float) -> Tensor:
    """Move the value at position i + 1 to position i, so that a token is predicted at the position before it."""
    return torch.cat((values[:, 1:], torch.full_like(values[:, :1], fill)), dim=1)


def extend_to_multiple(batch: ResponseBatch, multiple: int, special_tokens: SpecialTokens) -> ResponseBatch:
    """Append EOS tokens to responses until their lengths are multiples of a number.

    Args:
        batch: Prompts and responses.
        multiple: The number, at least 1.
        special_tokens: The tokenizer's special ids.
    """
    lengths = (batch.response_lengths + multiple - 1) // multiple * multiple
    return extend_responses(batch, lengths, special_tokens)


def text_then_masks(
    num_text: int, num_before: Int[Tensor, "batch mask"], distance: Int[Tensor, "batch mask"]
) -> Int[Tensor, "batch token range 2"]:
    """Return visible ranges for a sequence in which masks follow the whole text.

    Text sees text causally. A mask sees a prefix of the text, some masks directly before it, and itself.

    Args:
        num_text: Number of text tokens.
        num_before: Length of the prefix, by mask; 0 for padding.
        distance: Number of visible masks directly before the mask, by mask; 0 for padding.
    """
    text = torch.arange(1, num_text + 1, device=num_before.device).expand(len(num_before), -1)
    index = num_text + torch.arange(num_before.shape[1], device=num_before.device)
    to_text = torch.cat((text, num_before), 1)
    to_masks = torch.stack((index - distance, (index + 1).expand_as(distance)), -1)
    return torch.stack((F.pad(to_text[..., None], (1, 0)), F.pad(to_masks, (0, 0, num_text, 0))), 2)


def random_subset(
    order: Int[Tensor, "*rows place"], candidates: Bool[Tensor, "*rows place"], count: Shaped[Tensor, "*rows"]
) -> Bool[Tensor, "*rows place"]:
    """Choose exactly ``count`` candidates along the last axis, or all if there are fewer.

    Args:
        order: Random integers from :meth:`KeyedNoise.bits`; the candidates with the lowest integers are chosen.
        candidates: Places that may be chosen.
        count: Number of candidates to choose, by row.
    """
    ranks = order.where(candidates, 2**53).argsort(dim=-1, stable=True).argsort(dim=-1)  # bits stay below 2**53
    return candidates & (ranks < count[..., None])
