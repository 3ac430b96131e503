"""Masked diffusion over whole responses, as LLaDA and Dream are trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from refusion_lit.modeling.attention import order_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives.base import (
    Objective,
    extend_responses,
    mask_probability,
    require_option,
    required_mask_id,
    response_places,
    shift_left,
)
from refusion_lit.objectives.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Masked(Objective):
    """Response tokens are masked independently and predicted from all others, in both directions.

    Spec 01, supervised fine-tuning (arXiv 2502.09992): p = (1 - eps) t + eps, one t for each sample; the loss
    is, for each sample, the sum over masked tokens of cross-entropy / p, divided by the response's length; then
    the mean over samples. Its one term is ``mdm``. Deliberate difference: LLaDA pads responses with
    end-of-sequence tokens to the batch's longest; here they are padded to a multiple of ``pad_responses_to``, so
    that what a sample teaches does not depend on its neighbours.

    Attributes:
        eps: Least probability of masking a token, in (0, 1].
        pad_responses_to: Lengthen responses with end-of-sequence tokens, masked and scored like any other, to a
            multiple of this; at least 1. Give the canvas length that decoders will use, so that the model
            learns to end on a canvas longer than the answer. ``None``: no lengthening.
        shifted: The hidden state at place i - 1 predicts the mask at place i (Dream, spec 02), as an
            autoregressive model's head does. A sample without a prompt then has no target for its first token.
        cart_p: Replace 1 / p by Dream's context-adaptive weights (CART, spec 02) of this sharpness, in (0, 1]: a
            mask counts the more, the more clean tokens stand close to it. The rest of the normalisation
            stays as above. ``None``: 1 / p.
    """

    eps: float = 1e-3
    pad_responses_to: int | None = None
    shifted: bool = False
    cart_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be trained with."""
        super().__post_init__()
        multiple = self.pad_responses_to
        require_option(0 < self.eps <= 1, "eps", "a number in (0, 1]", self.eps)
        require_option(multiple is None or multiple >= 1, "pad_responses_to", "at least 1, or null", multiple)
        require_option(
            self.cart_p is None or 0 < self.cart_p <= 1, "cart_p", "a number in (0, 1], or null", self.cart_p
        )

    @property
    def traits(self) -> ModelTraits:
        """Full attention; masks predict themselves or, shifted, are predicted by the place before."""
        return ModelTraits(attention="bidirectional", predictions=("mask_shifted" if self.shifted else "mask",))

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Float[Tensor, " batch"] | None = None,
    ) -> CorruptedBatch:
        """Mask response tokens independently; see :meth:`Objective.corrupt`."""
        mask_token_id = required_mask_id(self, special_tokens)
        batch = self._lengthened(batch, special_tokens)
        probability = mask_probability(noise, self.eps, mask_ratio)
        places, in_response = response_places(batch)
        is_masked = in_response & (noise.uniform("token_mask", len(places)) < probability[:, None])

        lengths = batch.prompt_lengths + batch.response_lengths
        is_real = places < lengths[:, None]
        weights = (1 / probability)[:, None]
        if self.cart_p is not None:
            weights = cart_weights(~is_masked & is_real, self.cart_p)
        weights = (weights / batch.response_lengths[:, None]).float().where(is_masked, 0.0)
        labels = batch.input_ids.where(is_masked, IGNORE_INDEX)
        if self.shifted:
            labels, weights = shift_left(labels, IGNORE_INDEX), shift_left(weights, 0.0)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, mask_token_id),
            position_ids=places.expand_as(labels),
            labels=labels,
            weights=weights,
            terms=torch.zeros_like(labels),
            term_names=("mdm",),
            counts=labels.new_full((1,), len(labels)).float(),  # float32 also where training in bf16 is the default
            coefficients=(1.0,),
            attention_mask=order_mask(torch.zeros_like(labels), lengths),
            is_masked=is_masked,
            is_real=is_real,
        )

    def _lengthened(self, batch: ResponseBatch, special_tokens: SpecialTokens) -> ResponseBatch:
        multiple = self.pad_responses_to
        if multiple is None:
            return batch
        lengths = (batch.response_lengths + multiple - 1) // multiple * multiple
        eos, padding = special_tokens.eos_token_ids[0], special_tokens.pad_token_id
        return extend_responses(batch, lengths, token_id=eos, pad_token_id=padding)


def cart_weights(is_clean: Bool[Tensor, "batch token"], sharpness: float) -> Float[Tensor, "batch token"]:
    """Weigh places by the clean tokens around them: half the sum over them of p (1 - p)^(distance - 1).

    Spec 02. The prompt's tokens count as clean, padding does not.

    Args:
        is_clean: Which places hold a token that is not masked.
        sharpness: p of the geometric law, in (0, 1]; 1 counts direct neighbours only.
    """
    places = torch.arange(is_clean.shape[1], device=is_clean.device)
    distance = (places[:, None] - places).abs().double()
    kernel = sharpness * (1 - sharpness) ** (distance - 1).clamp(min=0)
    return 0.5 * is_clean.float() @ kernel.float().masked_fill(distance == 0, 0.0)
