"""The objective ``MaskWindows``: it trains the plans that ReFusion's decoder makes.

The decoder plans by feeding masks after a prefix of the response. Training does the same after many prefixes at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import shift_left, text_then_masks
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class MaskWindows(Objective):
    """Predicts windows of masks from the text before them, and the response from left to right.

    A row contains prompt and response in text order, then a mask for every response token. The masks are cut into
    windows. A mask sees the text before its window and the earlier masks of the window, as in a plan of ReFusion's
    decoder after a complete prefix. A forward over the row therefore trains a plan for every window, while
    :class:`Hybrid` trains a single plan per forward. The terms are ``ar``, the mean over all labelled text tokens, and
    ``mdm``, the mean over all masks, weighted by ``decay``.

    Train on text that the model itself generates: the model's own next-token predictions verify a plan.

    >>> special = SpecialTokens(mask_token_id=9, eos_token_ids=(8,), pad_token_id=8, vocab_size=10)
    >>> batch = ResponseBatch(input_ids=torch.tensor([[1, 2, 3, 4, 5, 8]]), prompt_lengths=torch.tensor([2]),
    ...                       response_lengths=torch.tensor([4]), sample_keys=torch.tensor([0]))
    >>> corrupted = MaskWindows(window=2, num_tilings=1).corrupt(batch, KeyedNoise(torch.tensor([0])), special)
    >>> corrupted.input_ids.tolist()
    [[1, 2, 3, 4, 5, 8, 9, 9, 9, 9]]

    Attributes:
        window: Tokens per window, at least 1: the masks that a plan drafts at once.
        num_tilings: Number of times the response is cut into windows, always from a random offset, at least 1. The
            first window is shorter.
        decay: Base of the weights, in (0, 1]. The mask at offset k in a window has weight decay^k, because a draft
            counts only if all earlier drafts are accepted.
        mdm_weight: Coefficient of the term ``mdm``, at least 0.
        ar_weight: Coefficient of the term ``ar``, at least 0.
    """

    trained = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    """Like :class:`Hybrid`: causal attention; masks predict themselves, clean tokens the next token."""

    ranges = {"window": 1, "num_tilings": 1, "decay": "(0, 1]", "mdm_weight": 0.0, "ar_weight": 0.0}
    window: int = 8
    num_tilings: int = 2
    decay: float = 0.9
    mdm_weight: float = 1.0
    ar_weight: float = 1.0

    @property
    def terms(self) -> Mapping[str, float]:
        """The next-token term and the masks' term, with the names of :class:`Hybrid`."""
        return {"ar": self.ar_weight, "mdm": self.mdm_weight}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Append the windows to the texts; see :meth:`Objective.corrupt`. A ``mask_ratio`` has no effect."""
        mask_token_id = required_mask_id(self, special_tokens)
        mask_probability(noise, 0.0, mask_ratio)  # refuses an invalid ratio
        ids = batch.input_ids
        in_response = batch.in_response
        num_text = ids.shape[1]
        # Indices in the response: of the masks, and of the first mask in the window of a mask.
        place = torch.arange(int(batch.response_lengths.max().cpu()), device=ids.device)
        offset = (noise.uniform("window", self.num_tilings) * self.window).long()[..., None]
        window_start = ((place - offset).div(self.window, rounding_mode="floor") * self.window + offset).clamp(min=0)
        window_start = rearrange(window_start, "batch tiling mask -> batch (tiling mask)")
        place = repeat(place, "mask -> (tiling mask)", tiling=self.num_tilings)
        offset_in_window = place - window_start
        is_mask = place < batch.response_lengths[:, None]
        starts = batch.prompt_lengths[:, None]
        position = (starts + place).where(is_mask, num_text)

        next_ids = shift_left(ids.where(in_response, IGNORE_INDEX), IGNORE_INDEX).where(in_response, IGNORE_INDEX)
        masked_ids = ids.gather(1, position.clamp(max=num_text - 1)).where(is_mask, IGNORE_INDEX)
        text_weights = (next_ids != IGNORE_INDEX).double()
        mask_weights = (self.decay ** offset_in_window.double()).where(is_mask, 0.0)
        masks = torch.full_like(position, mask_token_id).where(is_mask, special_tokens.pad_token_id)
        return CorruptedBatch(
            input_ids=torch.cat((ids, masks), 1),
            position_ids=torch.cat((batch.positions.expand_as(ids), position), 1),
            labels=torch.cat((next_ids, masked_ids), 1),
            weights=torch.cat((text_weights, mask_weights), 1).float(),
            terms=F.pad(torch.ones_like(masked_ids), (num_text, 0)),
            counts=torch.stack((text_weights.double().sum(), mask_weights.double().sum())),
            visible=text_then_masks(
                num_text, (starts + window_start).where(is_mask, 0), offset_in_window.where(is_mask, 0)
            ),
            is_masked=F.pad(is_mask, (num_text, 0)),
            is_real=torch.cat((batch.is_real, is_mask), 1),
            draft_offsets=F.pad(offset_in_window.where(is_mask, -1), (num_text, 0), value=-1),
        )
