"""An objective that masks the last token of each response."""

from dataclasses import dataclass

import torch
from torch import Tensor

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class LastToken(Objective):
    """Predicts the last token of a response from all tokens before it."""

    trained = ModelTraits(attention="causal", predictions=("mask",))
    """Causal attention; the logits at a mask predict the token it hides."""

    term = "last"

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,  # noqa: ARG002 - nothing is random
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Tensor | None = None,  # noqa: ARG002 - always the same mask
    ) -> CorruptedBatch:
        """Mask the last token of every response and label it with itself."""
        positions = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        last = batch.prompt_lengths + batch.response_lengths - 1
        is_masked = positions == last[:, None]
        labels = batch.input_ids.where(is_masked, IGNORE_INDEX)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, special_tokens.mask_token_id),
            position_ids=positions.expand_as(labels),
            labels=labels,
            weights=is_masked.float(),
            terms=torch.zeros_like(labels),
            counts=torch.full((1,), float(len(labels))),
            is_masked=is_masked,
        )
