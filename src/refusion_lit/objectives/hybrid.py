"""ReFusion's hybrid objective: diffusion over slots, autoregression inside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives.base import Objective, mask_probability, require_option, required_mask_id
from refusion_lit.objectives.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.objectives.slot_corruption import SlotLayout, corrupt_slots, draw_slot_sizes
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Hybrid(Objective):
    """Masked slots are predicted from the prompt and the clean slots; clean slots token by token.

    Spec 11, section 2 (arXiv 2512.13586). Every response token but the first of a clean slot is supervised in
    every step. The terms are ``ar``, a mean over all labelled clean tokens, and ``mdm``: for each sample the sum
    over masked tokens of cross-entropy / p, divided by the response's length; then the mean over samples.

    Attributes:
        slot_sizes: Tokens a slot, drawn uniformly for each sample; each at least 1.
        eps: Least probability of masking a slot, in (0, 1].
        mdm_weight: Factor of the diffusion term (lambda), at least 0.
        ar_weight: Factor of the autoregressive term, at least 0.
    """

    slot_sizes: tuple[int, ...] = (4, 8, 16, 32)
    eps: float = 1e-3
    mdm_weight: float = 1.0
    ar_weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained with."""
        super().__post_init__()
        sizes_are_right = len(self.slot_sizes) > 0 and min(self.slot_sizes) >= 1
        require_option(sizes_are_right, "slot_sizes", "one or more sizes of at least 1", self.slot_sizes)
        require_option(0 < self.eps <= 1, "eps", "a number in (0, 1]", self.eps)
        require_option(self.mdm_weight >= 0, "mdm_weight", "a number of at least 0", self.mdm_weight)
        require_option(self.ar_weight >= 0, "ar_weight", "a number of at least 0", self.ar_weight)

    @property
    def traits(self) -> ModelTraits:
        """Causal attention; masks predict themselves, clean tokens the next of their slot."""
        return ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Float[Tensor, " batch"] | None = None,
    ) -> CorruptedBatch:
        """Cut into slots, mask some, move the clean ones forward; see :meth:`Objective.corrupt`."""
        probability = mask_probability(noise, self.eps, mask_ratio)
        layout = corrupt_slots(
            batch,
            noise,
            slot_sizes=draw_slot_sizes(noise, self.slot_sizes),
            min_slot_size=min(self.slot_sizes),
            mask_probability=probability,
            mask_token_id=required_mask_id(self, special_tokens),
        )
        return self.targets(layout, mask_probability=probability, response_lengths=batch.response_lengths)

    def targets(
        self,
        layout: SlotLayout,
        *,
        mask_probability: Float[Tensor, " batch"],
        response_lengths: Int[Tensor, " batch"],
    ) -> CorruptedBatch:
        """Give the labels of a layout their terms and weights.

        Args:
            layout: A corrupted batch, however it came about.
            mask_probability: Probability with which each row's slots were masked.
            response_lengths: Response tokens of each row.
        """
        is_labelled = layout.labels != IGNORE_INDEX
        mdm_weights = 1 / (mask_probability.double() * response_lengths)
        weights = torch.where(layout.is_masked, mdm_weights[:, None], 1.0).masked_fill(~is_labelled, 0.0)
        num_clean = (is_labelled & ~layout.is_masked).sum()
        return CorruptedBatch(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            labels=layout.labels,
            weights=weights.float(),
            terms=layout.is_masked.long(),
            term_names=("ar", "mdm"),
            counts=torch.stack((num_clean, torch.full_like(num_clean, len(layout.labels)))).float(),
            coefficients=(self.ar_weight, self.mdm_weight),
            is_masked=layout.is_masked,
            is_real=layout.is_real,
        )
