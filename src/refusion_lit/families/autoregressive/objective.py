"""Next-token training on responses: the baseline for other objectives."""

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
    """Predicts every response token from all earlier tokens, without noise.

    The prompt's last token predicts the first response token. Without a prompt, the first token is no target. The only
    term, ``ar``, is the batch's mean cross-entropy over labelled tokens.

    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> Autoregressive().corrupt(batch, KeyedNoise(batch.sample_keys), special).labels
    tensor([[   6,    7,    8, -100]])
    """

    trained = ModelTraits(attention="causal", predictions=("next_token",))

    term = "ar"

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Label every position with the next response token. Noise and mask ratios have no effect."""
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
