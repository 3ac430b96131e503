"""Next-token training on responses: the baseline of all other objectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective
from refusion_lit.learning.text_order import shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Objective):
    """Predicts each response token from all tokens before it; corrupts nothing.

    The prompt's last token predicts the first response token; without a prompt, that token has no target. The only
    term, ``ar``, is the mean cross-entropy over all labelled tokens of the batch.
    """

    trained = ModelTraits(attention="causal", predictions=("next_token",))

    term = "ar"

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Label each position with the response token after it; noise and mask ratios have no effect."""
        del noise, special_tokens, mask_ratio
        labels = shift_left(batch.input_ids.where(batch.in_response, IGNORE_INDEX), IGNORE_INDEX)
        is_labelled = labels != IGNORE_INDEX
        return CorruptedBatch(
            input_ids=batch.input_ids,
            position_ids=batch.positions.expand_as(labels),
            labels=labels,
            weights=is_labelled.float(),
            terms=torch.zeros_like(labels),
            counts=is_labelled.sum()[None].float(),
            is_masked=torch.zeros_like(is_labelled),
            is_real=batch.is_real,
        )
