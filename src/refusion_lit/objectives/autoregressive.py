"""Ordinary next-token training on responses: what every other objective is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives.base import Objective, response_places, shift_left
from refusion_lit.objectives.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Objective):
    """Each response token is predicted by the token before it; nothing is corrupted.

    The prompt's last token predicts the response's first; a sample without a prompt has no target for it. The
    one term, ``ar``, is the mean cross-entropy over all labelled tokens of the batch.
    """

    @property
    def traits(self) -> ModelTraits:
        """Causal attention; every token predicts the next."""
        return ModelTraits(attention="causal", predictions=("next_token",))

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,  # noqa: ARG002 - part of the interface
        special_tokens: SpecialTokens,  # noqa: ARG002
        *,
        mask_ratio: Float[Tensor, " batch"] | None = None,  # noqa: ARG002
    ) -> CorruptedBatch:
        """Label each place with the response token after it; noise and mask ratios have no effect."""
        places, in_response = response_places(batch)
        labels = shift_left(batch.input_ids.where(in_response, IGNORE_INDEX), IGNORE_INDEX)
        is_labelled = labels != IGNORE_INDEX
        return CorruptedBatch(
            input_ids=batch.input_ids,
            position_ids=places.expand_as(labels),
            labels=labels,
            weights=is_labelled.float(),
            terms=torch.zeros_like(labels),
            term_names=("ar",),
            counts=is_labelled.sum()[None].float(),
            coefficients=(1.0,),
            is_masked=torch.zeros_like(in_response),
            is_real=places < (batch.prompt_lengths + batch.response_lengths)[:, None],
        )
