"""Cutting responses into slots, masking whole slots and laying the sequence out anew (spec 11, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.modeling.transfer import to_device
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives.base import response_places
from refusion_lit.objectives.batch import IGNORE_INDEX, ResponseBatch

_ORDER_LIMIT = 2**53  # KeyedNoise.bits stays below this


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """A corrupted batch in sequence order: prompt, clean slots, masked slots, padding.

    Attributes:
        input_ids: Tokens, the mask's id in masked slots.
        position_ids: Place of each token in the text.
        labels: Own token at masked positions, the slot's next token at clean ones, else ``IGNORE_INDEX``.
        is_masked: Which positions belong to masked slots.
        is_real: Which positions are no padding.
    """

    input_ids: Int[Tensor, "batch token"]
    position_ids: Int[Tensor, "batch token"]
    labels: Int[Tensor, "batch token"]
    is_masked: Bool[Tensor, "batch token"]
    is_real: Bool[Tensor, "batch token"] | None = None


def draw_slot_sizes(noise: KeyedNoise, slot_sizes: tuple[int, ...]) -> Int[Tensor, " batch"]:
    """Draw each row's slot size, all sizes being equally probable."""
    choice = (noise.uniform("slot_size", 1)[:, 0] * len(slot_sizes)).long()
    return to_device(slot_sizes, choice.device)[choice]


def corrupt_slots(
    batch: ResponseBatch,
    noise: KeyedNoise,
    *,
    slot_sizes: Int[Tensor, " batch"],
    min_slot_size: int,
    mask_probability: Float[Tensor, " batch"],
    mask_token_id: int,
) -> SlotLayout:
    """Mask slots independently, then move the clean ones, in random order, before the masked ones.

    Args:
        batch: Clean prompts and responses.
        noise: Streams ``slot_mask`` and ``slot_order`` are used, one number a slot.
        slot_sizes: Each row's slot size; a row's last slot may be shorter.
        min_slot_size: A lower bound of ``slot_sizes``, known without looking at the device.
        mask_probability: Probability with which each row's slots are masked.
        mask_token_id: What stands in masked slots.
    """
    num_tokens = batch.input_ids.shape[1]
    num_slots = -(-num_tokens // min_slot_size)
    places, in_response = response_places(batch)
    offsets = (places - batch.prompt_lengths[:, None]).clamp(min=0)
    slots = offsets // slot_sizes[:, None]

    slot_is_masked = noise.uniform("slot_mask", num_slots) < mask_probability[:, None]
    text_order = torch.arange(num_slots, device=slots.device)
    slot_keys = torch.where(slot_is_masked, _ORDER_LIMIT + text_order, noise.bits("slot_order", num_slots))
    slot_ranks = slot_keys.argsort(dim=1, stable=True).argsort(dim=1)

    is_masked = slot_is_masked.gather(1, slots) & in_response
    labels = torch.where(is_masked, batch.input_ids, _next_in_slot(batch, in_response, offsets, slot_sizes))
    input_ids = batch.input_ids.masked_fill(is_masked, mask_token_id)

    # One key a token: prompt, then the response by rank of its slot, then padding, each in text order.
    is_padding = places >= (batch.prompt_lengths + batch.response_lengths)[:, None]
    group = torch.where(in_response, 1 + slot_ranks.gather(1, slots), is_padding.long() * (num_slots + 1))
    order = (group * num_tokens + places).argsort(dim=1)
    return SlotLayout(
        input_ids=input_ids.gather(1, order),
        position_ids=order,
        labels=labels.gather(1, order),
        is_masked=is_masked.gather(1, order),
        is_real=~is_padding,  # which stays behind
    )


def _next_in_slot(
    batch: ResponseBatch,
    in_response: Bool[Tensor, "batch token"],
    offsets: Int[Tensor, "batch token"],
    slot_sizes: Int[Tensor, " batch"],
) -> Int[Tensor, "batch token"]:
    """Label each response token with the next one of its slot; the last of a slot has none."""
    following = batch.input_ids.roll(-1, dims=1)
    ends_slot = (offsets + 1) % slot_sizes[:, None] == 0
    ends_response = offsets + 1 == batch.response_lengths[:, None]
    return following.masked_fill(~in_response | ends_slot | ends_response, IGNORE_INDEX)
