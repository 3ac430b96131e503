"""What some objectives share: a random subset of places, and operations on batches in text order."""

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
    """Lengthen responses by appending copies of one token; padding fills up the batch to its longest row.

    Args:
        batch: A clean batch.
        lengths: New response lengths, none below the old ones.
        special_tokens: Ids of the tokenizer's special tokens.
        token_id: The appended token; ``None``: the end-of-sequence token.
        width: Length of the longest row where it is known; ``None``: wait for the device to tell.
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
    """Move the value at position i + 1 to position i, so that each token is predicted by the one before it."""
    return torch.cat((values[:, 1:], torch.full_like(values[:, :1], fill)), dim=1)


def extend_to_multiple(batch: ResponseBatch, multiple: int, special_tokens: SpecialTokens) -> ResponseBatch:
    """Lengthen every response with end-of-sequence tokens to a multiple of a number of tokens.

    Args:
        batch: Prompts and responses.
        multiple: At least 1, which changes nothing.
        special_tokens: Ids of the tokenizer's special tokens.
    """
    lengths = (batch.response_lengths + multiple - 1) // multiple * multiple
    return extend_responses(batch, lengths, special_tokens)


def text_then_masks(
    num_text: int, num_before: Int[Tensor, "batch mask"], distance: Int[Tensor, "batch mask"]
) -> Int[Tensor, "batch token range 2"]:
    """Let text see text causally, and each of the masks that follow it part of the text, masks before it and itself.

    Args:
        num_text: Tokens of the text part.
        num_before: Leading tokens of the text that each mask sees; 0 for padding.
        distance: Number of masks before it that each mask sees, side by side with it; 0 for padding.
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
        order: Random integers from :meth:`KeyedNoise.bits`; the candidates with the lowest ones are chosen.
        candidates: Places that may be chosen.
        count: Number of candidates to choose in each row.
    """
    ranks = order.where(candidates, 2**53).argsort(dim=-1, stable=True).argsort(dim=-1)  # bits stay below 2**53
    return candidates & (ranks < count[..., None])
