"""Approximate likelihoods of a hybrid model, compared with the exact one: slots in any order, and all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.decoding import SelfSpeculative
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import required_mask_id, response_positions
from refusion_lit.noise import KeyedNoise
from refusion_lit.policy import LeftToRight, MaskedBound
from refusion_lit.policy.likelihood import laid_out
from refusion_lit.refusion.objective import next_in_slot
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least


@dataclass(frozen=True, kw_only=True)
class SlotBound(MaskedBound):
    """Coupled bound over all orders of slots: ESPO for hybrid models.

    A masked slot is predicted as by ``LeftToRight``, but from the prompt and the visible slots in random order.

    Attributes:
        slot_size: Tokens per slot; that of the decoder.
    """

    decoders = (SelfSpeculative,)
    slot_size: int = 8

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        require_at_least("objective.likelihood.slot_size", self.slot_size, 1)

    @property
    def traits(self) -> ModelTraits:
        """The traits of the hybrid objective."""
        return LeftToRight().traits

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Lay out a view for each set of masked slots; see :meth:`Likelihood.layout`."""
        num_slots = -(-batch.input_ids.shape[1] // self.slot_size)
        starts = torch.arange(num_slots, device=batch.input_ids.device) * self.slot_size
        is_masked, weights = self.drawn(noise, starts < batch.response_lengths[:, None])
        order = noise.bits("slot_order", num_slots).repeat(self.num_forwards, 1)
        mask = required_mask_id(self, special_tokens)
        return slots_apart(batch, special_tokens, mask, self.slot_size, is_masked, weights, order)


@dataclass(frozen=True, kw_only=True)
class MeanField(LeftToRight):
    """Every slot is predicted from the prompt alone, as if all were drawn at once (d1, arXiv 2504.12216, for slots).

    It is neither the policy nor a bound of it.
    """

    is_exact = False

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:  # noqa: ARG002
        """Mask all slots; see :meth:`Likelihood.layout`."""
        num_slots = -(-batch.input_ids.shape[1] // self.slot_size)
        order = torch.arange(num_slots, device=batch.input_ids.device).expand(len(batch.input_ids), -1)
        is_masked = order * self.slot_size < batch.response_lengths[:, None]
        weights = torch.ones_like(batch.response_lengths, dtype=torch.float64)
        mask = required_mask_id(self, special_tokens)
        return slots_apart(batch, special_tokens, mask, self.slot_size, is_masked, weights, order)


def slots_apart(
    batch: ResponseBatch,
    special_tokens: SpecialTokens,
    mask: int,
    size: int,
    is_masked: Bool[Tensor, "row slot"],
    weights: Float[Tensor, " row"],
    order: Int[Tensor, "row slot"],
) -> CorruptedBatch:
    """Lay out prompts, visible slots by ``order``, masked slots, and the mask of each masked slot's first place.

    A masked slot sees the prompt, the visible slots and itself.

    Args:
        batch: Prompts and answers.
        special_tokens: Ids of the tokenizer's special tokens.
        mask: Id of the mask token.
        size: Tokens per slot.
        is_masked: Masked slots of each row; rows are views of the batch, view-major.
        weights: Weight of each row's labels.
        order: Numbers by which visible slots are sorted.
    """
    num_views = len(is_masked) // len(batch.input_ids)
    batch = ResponseBatch(
        input_ids=batch.input_ids.repeat(num_views, 1),
        prompt_lengths=batch.prompt_lengths.repeat(num_views),
        response_lengths=batch.response_lengths.repeat(num_views),
        sample_keys=batch.sample_keys.repeat(num_views),
    )
    num_rows, num_tokens = batch.input_ids.shape
    num_slots = is_masked.shape[1]
    positions, in_response = response_positions(batch)
    places = (positions - batch.prompt_lengths[:, None]).clamp(min=0)
    rest = next_in_slot(batch, in_response, places, torch.full_like(batch.prompt_lengths, size))
    ranks = torch.where(is_masked, 2**53, order).argsort(dim=1, stable=True).argsort(dim=1)
    is_real = positions < (batch.prompt_lengths + batch.response_lengths)[:, None]
    group = torch.where(in_response, 1 + ranks.gather(1, places // size), (~is_real).long() * (num_slots + 1))
    at = (group * num_tokens + positions).argsort(1)

    places = places.gather(1, at)
    starts = torch.arange(num_slots, device=at.device) * size
    firsts = batch.prompt_lengths[:, None] + starts
    lengths = (batch.response_lengths[:, None] - starts).clamp(0, size)
    context = (batch.prompt_lengths + (lengths * ~is_masked).sum(1))[:, None]
    is_apart = torch.cat((is_masked.gather(1, places // size) & in_response.gather(1, at), is_masked), 1)
    index = torch.arange(num_tokens + num_slots, device=at.device).expand(num_rows, -1)
    own_start = index - F.pad(places % size, (0, num_slots))
    own_start = own_start.where(is_apart | (index >= num_tokens), 0)
    seen = context.where(is_apart, 0)
    first_tokens = batch.input_ids.gather(1, firsts.clamp(max=num_tokens - 1))
    labels = torch.cat((rest.gather(1, at), first_tokens), 1).where(is_apart, IGNORE_INDEX)
    masks = torch.full_like(firsts, mask).where(is_masked, special_tokens.pad_token_id)
    before = torch.stack((torch.zeros_like(seen), seen), -1)
    return laid_out(
        labels,
        weights=(labels != IGNORE_INDEX) * weights[:, None].float(),
        input_ids=torch.cat((batch.input_ids.gather(1, at), masks), 1),
        position_ids=torch.cat((at, firsts.where(is_masked, num_tokens)), 1),
        visible=torch.stack((before, torch.stack((own_start, index + 1), -1)), 2),
        is_masked=F.pad(is_masked, (num_tokens, 0)),
        is_real=torch.cat((is_real, is_masked), 1),
        num_views=num_views,
    )
