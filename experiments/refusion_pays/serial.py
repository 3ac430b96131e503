"""A corruption for ReFusion's hybrid objective that shows what its decoder sees: a prefix and one serial block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, mask_probability, required_mask_id
from refusion_lit.noise import KeyedNoise
from refusion_lit.refusion.objective import Hybrid, corrupt_slots, draw_slot_sizes, most_slots
from refusion_lit.types import SpecialTokens
from refusion_lit.utils.require import require_at_least


@dataclass(frozen=True, kw_only=True)
class SerialHybrid(Hybrid):
    """:class:`Hybrid` that masks slots only where a decoder with serial blocks plans: after a complete prefix.

    Each response has a prefix of complete slots in text order, then a serial block, in which slots are masked as by
    :class:`Hybrid`. What lies beyond the block is not fed, as the decoder has not planned it yet: the positions saved
    are further samples in the same budget. So masks are never far from their context. The masked term is weighted by
    1 / (p * tokens of the block).

    Attributes:
        block_size: Tokens per serial block, at least 1; whole slots, at least one.
    """

    block_size: int = 32

    def __post_init__(self) -> None:
        """Refuse options that cannot be trained with."""
        super().__post_init__()
        require_at_least("objective.block_size", self.block_size, 1)

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Choose a serial block, mask some of its slots, drop what follows; see :meth:`Objective.corrupt`.

        With given ratios the whole response is one block, so that validation compares with :class:`Hybrid`.
        """
        if mask_ratio is not None:
            return super().corrupt(batch, noise, special_tokens, mask_ratio=mask_ratio)
        probability = mask_probability(noise, self.eps, mask_ratio)
        sizes = draw_slot_sizes(noise, self.slot_sizes)
        first, end = self._block(batch, noise, sizes)
        numbers = torch.arange(num_slots := most_slots(batch, self.slot_sizes), device=sizes.device)
        in_block = (numbers >= first[:, None]) & (numbers < end[:, None])
        slot_is_masked = in_block & (noise.uniform("slot_mask", num_slots) < probability[:, None])
        mask = required_mask_id(self, special_tokens)
        stop = (end * sizes).minimum(batch.response_lengths)
        before = numbers < first[:, None]  # these stay in text order
        order = torch.where(before, numbers - num_slots, noise.bits("slot_order", num_slots))
        layout = corrupt_slots(
            replace(batch, response_lengths=stop), noise, slot_is_masked,
            slot_sizes=sizes, mask_token_id=mask, clean_order=order,
        )  # fmt: skip
        length = stop - first * sizes
        corrupted = self.targets(layout, mask_probability=probability, response_lengths=length.clamp(min=1))
        assert corrupted.is_real is not None
        width = max(int(corrupted.is_real.sum(1).amax().item()), 1)  # waits for the device; saves the positions beyond
        return replace(
            corrupted,
            **{
                name: getattr(corrupted, name)[:, :width]
                for name in (
                    "input_ids",
                    "position_ids",
                    "labels",
                    "weights",
                    "terms",
                    "is_masked",
                    "is_real",
                    "draft_offsets",
                )
            },
        )

    def _block(
        self, batch: ResponseBatch, noise: KeyedNoise, slot_sizes: Int[Tensor, " batch"]
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """Draw the first slot of each row's serial block uniformly; return it and the slot after the block."""
        num_own = ((batch.response_lengths + slot_sizes - 1) // slot_sizes).clamp(min=1)
        first = (noise.uniform("serial_block", 1)[:, 0] * num_own).long()
        return first, first + (self.block_size // slot_sizes).clamp(min=1)
