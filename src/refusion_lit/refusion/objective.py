"""ReFusion's hybrid objective: diffusion over slots, autoregression inside slots (arXiv 2512.13586)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require, require_at_least

_ORDER_LIMIT = 2**53  # KeyedNoise.bits stays below this


@dataclass(frozen=True, kw_only=True)
class Hybrid(Objective):
    """Predicts masked slots from prompt and clean slots, and clean slots token by token.

    ReFusion (arXiv 2512.13586). Every step supervises all response tokens except the first token of a clean slot. The
    terms are ``ar``, the mean over all labelled clean tokens, and ``mdm``, the mean over samples. A sample's ``mdm`` is
    its masked tokens' cross-entropy, summed and divided by p and by the response length.

    >>> special = SpecialTokens(mask_token_id=9, eos_token_ids=(8,), pad_token_id=8, vocab_size=10)
    >>> batch = ResponseBatch(input_ids=torch.tensor([[1, 2, 3, 4, 5, 8]]), prompt_lengths=torch.tensor([2]),
    ...                       response_lengths=torch.tensor([4]), sample_keys=torch.tensor([0]))
    >>> corrupted = Hybrid(slot_sizes=(2,)).corrupt(batch, KeyedNoise(torch.tensor([0])), special)
    >>> corrupted.input_ids.tolist()  # the second slot is masked
    [[1, 2, 3, 4, 9, 9]]

    Attributes:
        slot_sizes: Slot sizes in tokens, at least 1; a sample's slot size is drawn uniformly.
        eps: Smallest probability with which a slot is masked, in (0, 1].
        mdm_weight: The diffusion term's coefficient (lambda), at least 0.
        ar_weight: The autoregressive term's coefficient, at least 0.
    """

    trained = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))

    ranges = {"eps": "(0, 1]", "mdm_weight": 0.0, "ar_weight": 0.0}
    slot_sizes: tuple[int, ...] = (4, 8, 16, 32)
    eps: float = 1e-3
    mdm_weight: float = 1.0
    ar_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = isinstance(self.slot_sizes, Sequence) and len(self.slot_sizes) > 0
        sizes = "one or more sizes of at least 1"
        fix = "name sizes such as [4, 8, 16, 32]"
        require(valid, "objective.slot_sizes", sizes, self.slot_sizes, fix)
        for size in self.slot_sizes:
            require_at_least("objective.slot_sizes", size, 1)

    @property
    def terms(self) -> Mapping[str, float]:
        """The autoregressive and the masked-diffusion term."""
        return {"ar": self.ar_weight, "mdm": self.mdm_weight}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Cut into slots, mask some, move the clean slots forward; see :meth:`Objective.corrupt`."""
        probability = mask_probability(noise, self.eps, mask_ratio)
        slot_sizes = draw_slot_sizes(noise, self.slot_sizes)
        slot_is_masked = noise.uniform("slot_mask", most_slots(batch, self.slot_sizes)) < probability[:, None]
        mask_token_id = required_mask_id(self, special_tokens)
        layout = corrupt_slots(batch, noise, slot_is_masked, slot_sizes=slot_sizes, mask_token_id=mask_token_id)
        return self.targets(layout, mask_probability=probability, response_lengths=batch.response_lengths)

    def targets(
        self,
        layout: CorruptedBatch,
        *,
        mask_probability: Float[Tensor, " batch"],
        response_lengths: Int[Tensor, " batch"],
    ) -> CorruptedBatch:
        """Set a layout's label weights and the terms' denominators.

        Args:
            layout: A batch from :func:`corrupt_slots`.
            mask_probability: Probability per row with which its slots were masked.
            response_lengths: Number of response tokens per row.
        """
        is_masked = layout.terms == 1
        is_labelled = layout.labels != IGNORE_INDEX
        mdm_weights = 1 / (mask_probability.double() * response_lengths)
        weights = torch.where(is_masked, mdm_weights[:, None], 1.0).masked_fill(~is_labelled, 0.0)
        num_clean = (is_labelled & ~is_masked).sum()
        counts = torch.stack((num_clean, torch.full_like(num_clean, len(layout.labels)))).float()
        return replace(layout, weights=weights.float(), counts=counts)


def draw_slot_sizes(noise: KeyedNoise, slot_sizes: tuple[int, ...]) -> Int[Tensor, " batch"]:
    """Draw every row's slot size uniformly."""
    choice = (noise.uniform("slot_size", 1)[:, 0] * len(slot_sizes)).long()
    drawn = torch.zeros_like(choice)
    for index, size in enumerate(slot_sizes):  # a table of sizes would have to be copied to the device
        drawn = drawn.masked_fill(choice == index, size)
    return drawn


def most_slots(batch: ResponseBatch, slot_sizes: tuple[int, ...]) -> int:
    """Return an upper bound on the number of slots, without waiting for the drawn sizes on the device."""
    return -(-batch.input_ids.shape[1] // min(slot_sizes))


def corrupt_slots(
    batch: ResponseBatch,
    noise: KeyedNoise,
    slot_is_masked: Bool[Tensor, "batch slot"],
    *,
    slot_sizes: Int[Tensor, " batch"],
    mask_token_id: int,
    masked_order: Int[Tensor, "batch slot"] | None = None,
    clean_order: Int[Tensor, "batch slot"] | None = None,
) -> CorruptedBatch:
    """Mask slots, then move the clean slots, in random order, before the masked slots.

    Clean tokens predict the next token of their slot (term 0), masks predict themselves (term 1). Weights and counts
    stay 0; :meth:`Hybrid.targets` sets them.

    Args:
        batch: Clean prompts and responses.
        noise: Its stream ``slot_order`` gives a number per slot.
        slot_is_masked: Which slots are masked. The slot axis covers the batch's longest response; slots past a
            response's end are ignored.
        slot_sizes: The rows' slot sizes; a row's last slot may be shorter.
        mask_token_id: The token in masked slots.
        masked_order: Masked slots' sort keys, at least 0; ``None`` for text order.
        clean_order: Clean slots' sort keys; ``None`` draws them, from 0 on.
    """
    num_tokens = batch.input_ids.shape[1]
    num_slots = slot_is_masked.shape[1]
    positions, in_response = batch.positions, batch.in_response
    offsets = (positions - batch.prompt_lengths[:, None]).clamp(min=0)
    slots = offsets // slot_sizes[:, None]

    masked_order = torch.arange(num_slots, device=slots.device) if masked_order is None else masked_order
    clean_order = noise.bits("slot_order", num_slots) if clean_order is None else clean_order
    slot_keys = torch.where(slot_is_masked, _ORDER_LIMIT + masked_order, clean_order)
    following = positions >= batch.ends[:, None]
    slot_ranks = slot_keys.argsort(dim=1, stable=True).argsort(dim=1)

    is_masked = slot_is_masked.gather(1, slots) & in_response
    labels = torch.where(is_masked, batch.input_ids, next_in_slot(batch, slot_sizes))
    input_ids = batch.input_ids.masked_fill(is_masked, mask_token_id)

    # One sort key per token: prompt, then the response by its slot's rank, then padding; text order within all three.
    group = torch.where(in_response, 1 + slot_ranks.gather(1, slots), following.long() * (num_slots + 1))
    order = (group * num_tokens + positions).argsort(dim=1)
    return CorruptedBatch(
        input_ids=input_ids.gather(1, order),
        position_ids=order,
        labels=labels.gather(1, order),
        weights=torch.zeros(order.shape, device=order.device),
        terms=is_masked.long().gather(1, order),
        counts=torch.zeros(2, device=order.device),
        is_masked=is_masked.gather(1, order),
        is_real=~following,  # padding is not moved
        draft_offsets=(offsets % slot_sizes[:, None]).where(is_masked, -1).gather(1, order),
    )


def next_in_slot(batch: ResponseBatch, slot_sizes: Int[Tensor, " batch"]) -> Int[Tensor, "batch token"]:
    """Label response tokens with the next token of their slot; a slot's last token has no label."""
    following = batch.input_ids.roll(-1, dims=1)
    lengths = batch.positions - batch.prompt_lengths[:, None] + 1  # of the response up to each token
    ends = (lengths % slot_sizes[:, None] == 0) | (lengths == batch.response_lengths[:, None])
    return following.masked_fill(~batch.in_response | ends, IGNORE_INDEX)
