"""An objective that masks the end of each response."""

from dataclasses import dataclass

import torch
from torch import Tensor

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import mask_probability, required_mask_id
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Ending(Objective):
    """Predicts the end of a response from the text before it, all tokens at once.

    Attributes:
        min_share: Smallest share of a response that is masked.
    """

    trained = ModelTraits(attention="causal", predictions=("mask",))
    """Causal attention; the logits at a mask predict the token it hides."""

    ranges = {"min_share": "(0, 1]"}
    term = "ending"
    min_share: float = 0.1

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Tensor | None = None,
    ) -> CorruptedBatch:
        """Mask a drawn share of each response at its end, or the share that validation gives."""
        share = mask_probability(noise, self.min_share, mask_ratio)
        num_masked = (share * batch.response_lengths).ceil()
        is_masked = batch.in_response & (batch.positions >= (batch.ends - num_masked)[:, None])
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=batch.positions.expand_as(batch.input_ids),
            labels=batch.input_ids.where(is_masked, IGNORE_INDEX),
            weights=is_masked.float(),
            terms=torch.zeros_like(batch.input_ids),
            counts=is_masked.sum()[None].float(),
            is_masked=is_masked,
            is_real=batch.is_real,
        )
