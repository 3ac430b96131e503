"""Masked diffusion over whole responses, as LLaDA and Dream are trained, and R2FT, which fine-tunes such models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.objective import Head, MaskRatio, Objective, in_chunks, mask_probability, required_mask_id
from refusion_lit.learning.text_order import extend_to_multiple, shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least


@dataclass(frozen=True, kw_only=True)
class Masked(Objective):
    """Masks response tokens independently and predicts them from all others, in both directions.

    Supervised fine-tuning of LLaDA (arXiv 2502.09992, equation 5): p = (1 - eps) t + eps with one t per sample; the
    loss is, for each sample, the sum over masked tokens of cross-entropy / p, divided by the response length; then
    the mean over samples. The only term is ``mdm``. Deliberate difference: LLaDA pads responses with end-of-sequence
    tokens to the longest of the batch; here they are padded to a multiple of ``pad_responses_to``, so that a sample's
    loss does not depend on the rest of its batch.

    Attributes:
        eps: Smallest mask probability, in (0, 1].
        pad_responses_to: Lengthen responses with end-of-sequence tokens, masked and scored like any other, to a
            multiple of this; at least 1. Set it to the canvas length that decoders will use, so that the model learns
            to end on a canvas longer than the answer. ``None``: no lengthening.
        shifted: The hidden state at position i - 1 predicts the mask at position i, as the head of an autoregressive
            model does (Dream, arXiv 2508.15487). A sample without a prompt then has no target for its first token.
        cart_p: Replace 1 / p by Dream's context-adaptive token-level weights (CART, arXiv 2508.15487) of this
            sharpness, in (0, 1]: a mask weighs more, the more clean tokens are near it. The rest of the normalisation
            stays. ``None``: 1 / p.
    """

    term = "mdm"
    ranges = {"eps": "(0, 1]", "pad_responses_to": 1, "cart_p": "(0, 1]"}
    eps: float = 1e-3
    pad_responses_to: int | None = None
    shifted: bool = False
    cart_p: float | None = None

    @property
    def traits(self) -> ModelTraits:
        """Bidirectional attention; masks predict themselves or, shifted, are predicted by the position before."""
        return ModelTraits(attention="bidirectional", predictions=("mask_shifted" if self.shifted else "mask",))

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens independently; see :meth:`Objective.corrupt`."""
        if self.pad_responses_to is not None:
            batch = extend_to_multiple(batch, self.pad_responses_to, special_tokens)
        probability = mask_probability(noise, self.eps, mask_ratio)
        num_tokens = batch.input_ids.shape[1]
        is_masked = batch.in_response & (noise.uniform("token_mask", num_tokens) < probability[:, None])
        weights = (1 / probability)[:, None]
        if self.cart_p is not None:
            weights = cart_weights(~is_masked & batch.is_real, self.cart_p)
        weights = (weights / batch.response_lengths[:, None]).float().where(is_masked, 0.0)
        labels = batch.input_ids.where(is_masked, IGNORE_INDEX)
        if self.shifted:
            labels = shift_left(labels, IGNORE_INDEX)
            weights = shift_left(weights, 0.0)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=batch.positions.expand_as(labels),
            labels=labels,
            weights=weights,
            terms=torch.zeros_like(labels),
            counts=labels.new_full((1,), len(labels)).float(),  # explicit: the default type may be bfloat16
            visible=batch.bidirectional,
            is_masked=is_masked,
            is_real=batch.is_real,
        )


def cart_weights(is_clean: Bool[Tensor, "batch token"], sharpness: float) -> Float[Tensor, "batch token"]:
    """Weigh positions by the clean tokens around them: half the sum over these of p (1 - p)^(distance - 1).

    The geometric kernel of CART (Dream, arXiv 2508.15487). Prompt tokens are clean, padding is not.

    Args:
        is_clean: Positions that hold a token and no mask.
        sharpness: p of the geometric distribution, in (0, 1]; 1 counts direct neighbours only.
    """
    positions = torch.arange(is_clean.shape[1], device=is_clean.device)
    distance = (positions[:, None] - positions).abs().double()
    kernel = sharpness * (1 - sharpness) ** (distance - 1).clamp(min=0)
    return 0.5 * is_clean.float() @ kernel.float().masked_fill(distance == 0, 0.0)


@dataclass(frozen=True, kw_only=True)
class R2FT(Objective):
    """Masks the response from a random place on, and prefers what stood there to a repetition of the text before it.

    Rule-based rejective fine-tuning of convolutional decoding (arXiv 2509.15188), for models that were trained with
    :class:`Masked` and repeat themselves where masks are far from known text. A cut c is uniform over the response;
    everything from c on is masked. The rejected text repeats the last g tokens before c, g uniform in [1,
    ``max_unit``], from a random one of them on, over a length uniform in [``min_span``, ``max_span``], at most to the
    response's end; an EOS token stands at a random place of it. Both texts are scored by one forward of the
    masked input. With w the mean of log p over the response, where known tokens count 0, and l the mean of log p of the
    rejected text over its length, the terms are ``preference``, -log sigmoid(beta (w - l)), and ``likelihood``, -w,
    both means over samples.

    Deliberate differences: no margin, as in the released script (the paper's text has 0.1); means over samples, not
    sums; an EOS token replaces a token of the rejected text and may stand at its end; the rejected text ends with
    the response. Samples cannot be packed.

    Attributes:
        max_unit: Maximum number of tokens that are repeated, at least 1.
        min_span: Minimum length of the rejected text, at least 1.
        max_span: Maximum length, at least ``min_span``.
        beta: Sharpness of the preference, above 0.
        likelihood_weight: Coefficient of ``likelihood``, at least 0.
        pad_responses_to: Lengthen responses with end-of-sequence tokens, as for :class:`Masked`.
    """

    trained = ModelTraits(attention="bidirectional", predictions=("mask",))

    packs = False
    ranges = {
        "max_unit": 1,
        "min_span": 1,
        "beta": "(0, inf)",
        "likelihood_weight": 0.0,
        "pad_responses_to": 1,
    }
    max_unit: int = 14
    min_span: int = 30
    max_span: int = 49
    beta: float = 1.0
    likelihood_weight: float = 0.1
    pad_responses_to: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("objective.max_span", self.max_span, self.min_span)

    @property
    def terms(self) -> Mapping[str, float]:
        """The preference and the likelihood of the text."""
        return {"preference": 1.0, "likelihood": self.likelihood_weight}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask responses from a cut on and make the rejected texts; see :meth:`Objective.corrupt`.

        With ``mask_ratio``, that share of a response is masked, rounded up.
        """
        if self.pad_responses_to is not None:
            batch = extend_to_multiple(batch, self.pad_responses_to, special_tokens)
        lengths = batch.response_lengths
        if mask_ratio is None:
            cut = batch.prompt_lengths + (noise.uniform("cut", 1)[:, 0] * lengths).long()
        else:
            cut = batch.ends - (mask_probability(noise, 0.0, mask_ratio) * lengths).ceil().long()
        is_masked = batch.in_response & (batch.positions >= cut[:, None])
        rejected = self._rejected(batch, cut, noise, special_tokens.eos_token_ids[0])
        num_valid = (cut > 0).sum()  # a sample without any text before the cut has nothing to repeat
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=batch.positions.expand_as(batch.input_ids),
            labels=batch.input_ids.where(is_masked, IGNORE_INDEX),
            weights=(1 / lengths.double())[:, None].float().where(is_masked, 0.0),
            terms=is_masked.long(),
            counts=torch.stack((num_valid, torch.full_like(num_valid, len(lengths)))).float(),
            visible=batch.bidirectional,
            is_masked=is_masked,
            rejected=rejected,
        )

    def _rejected(
        self, batch: ResponseBatch, cut: Int[Tensor, " batch"], noise: KeyedNoise, eos: int
    ) -> Int[Tensor, "batch token"]:
        """Return the rejected token of each position, or ``IGNORE_INDEX``."""
        chances = noise.uniform("rejected", 4).unbind(1)
        unit = (1 + (chances[0] * self.max_unit).long()).minimum(cut).clamp(min=1)
        phase = (chances[1] * unit).long()
        span = self.min_span + (chances[2] * (self.max_span - self.min_span + 1)).long()
        span = span.minimum(batch.ends - cut)
        offset = batch.positions - cut[:, None]
        source = (cut - unit)[:, None] + (offset + phase[:, None]) % unit[:, None]
        repeated = batch.input_ids.gather(1, source.clamp(min=0))
        place = (chances[3] * span).long()
        repeated = repeated.masked_fill(offset == place[:, None], eos)
        is_rejected = (offset >= 0) & (offset < span[:, None]) & (cut > 0)[:, None]
        return repeated.where(is_rejected, IGNORE_INDEX)

    def loss(self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: CorruptedBatch) -> LossOutput:
        """Compute the loss; see :meth:`Objective.loss`."""
        labels = corrupted.labels
        rejected = corrupted.rejected
        assert rejected is not None
        rows, columns = (labels != IGNORE_INDEX).nonzero().unbind(1)
        states = hidden[rows, columns]
        pairs = torch.stack((labels[rows, columns], rejected[rows, columns]), 1)

        def losses(logits: Tensor, pairs: Tensor) -> Tensor:
            return torch.stack([F.cross_entropy(logits, targets, reduction="none") for targets in pairs.unbind(1)])

        found = torch.cat(in_chunks(losses, head, states, pairs, chunk_size=self.chunk_size), 1)
        spread = found.new_zeros(2, *labels.shape)
        spread[:, rows, columns] = found  # what is not rejected has no loss there
        is_rejected = rejected != IGNORE_INDEX
        text = -(spread[0] * corrupted.weights).sum(1)
        repetition = -spread[1].sum(1) / is_rejected.sum(1).clamp(min=1)
        preference = -F.logsigmoid(self.beta * (text - repetition))
        sums = torch.stack((preference.where(is_rejected.any(1), 0.0).sum(), -text.sum()))
        return LossOutput(sums=sums, counts=corrupted.counts.to(sums.dtype), terms=self.terms)
