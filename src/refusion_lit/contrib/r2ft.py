"""Convolutional decoding (arXiv 2509.15188), for masked models that are decoded without blocks.

``Convolutional`` is the decoder. ``R2FT`` is the objective, rule-based rejective fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.decoder import RowState
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.objective import Head, MaskRatio, Objective, map_chunks, mask_probability, required_mask_id
from refusion_lit.learning.text_order import extend_to_multiple
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class Convolutional(LLaDA):
    """Decodes like :class:`~refusion_lit.decoding.LLaDA`, but prefers masks near known text.

    A mask's confidence is multiplied by tanh(n). n counts the unmasked positions, prompt included, in a window around
    the mask. The window has ``kernel_size`` positions, or one more if ``kernel_size`` is even.

    Source: convolutional decoding (arXiv 2509.15188).

    Attributes:
        kernel_size: Number of positions in the window, at least 1.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published/models/llada-tiny")
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=Convolutional(kernel_size=8, steps=8), max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=32;81+37=108;', 20, 8)
    """

    ranges = {"kernel_size": 1}
    kernel_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.order == "low_confidence" and self.block_length is None
        fix = "leave out block_length and order, or use LLaDA"
        got = f"order {self.order!r} and block_length {self.block_length}"
        require(fits, "kernel_size", "order 'low_confidence' without blocks", got, fix)

    def weigh(self, state: RowState, places: Sequence[int], confidences: Sequence[float]) -> Sequence[float]:
        """Return confidences, lowered where little text is near."""
        factors = [math.tanh(num_known_around(state, place, self.kernel_size)) for place in places]
        return [confidence * factor for confidence, factor in zip(confidences, factors, strict=True)]


def num_known_around(state: RowState, place: int, kernel_size: int) -> int:
    """Count unmasked positions, prompt included, in the window around a place in the canvas."""
    start = place - kernel_size // 2
    stop = place + kernel_size // 2 + 1
    num_prompt = min(max(-start, 0), state.prompt_length)
    return num_prompt + state.is_masked[max(start, 0) : stop].count(False)


@dataclass(frozen=True, kw_only=True)
class R2FT(Objective):
    """Masks the end of a response, and prefers the true text to a repetition of the text before it.

    Source: R2FT, rule-based rejective fine-tuning (arXiv 2509.15188), for models that were trained with :class:`Masked`
    and repeat themselves where masks are far from known text. A cut c is uniform over the response; all tokens from c
    on are masked. The rejected text repeats the last g tokens before c, where g is uniform in [1, ``max_unit``]. It
    starts with a random token among them. Its length is uniform in [``min_span``, ``max_span``], but it ends with the
    response. An EOS token replaces a random token of the rejected text. A single forward of the masked input scores
    both texts. w is the mean of log p over the response, where known tokens count 0; l is the mean of log p over the
    rejected text. The terms are means over samples: ``preference``, -log sigmoid(beta (w - l)), and ``likelihood``, -w.

    Deliberate differences: no margin, as in the released script (0.1 in the paper's text); means over samples, not
    sums; the EOS token replaces a token, also the last token; the rejected text ends with the response. Samples cannot
    be packed.

    Attributes:
        max_unit: Maximum number of repeated tokens, at least 1.
        min_span: Minimum length of the rejected text, at least 1.
        max_span: Maximum length of the rejected text, at least ``min_span``.
        beta: Sharpness of the preference, above 0.
        likelihood_weight: Coefficient of ``likelihood``, at least 0.
        pad_responses_to: Lengthen responses with EOS tokens, as for :class:`Masked`.

    >>> import torch
    >>> from refusion_lit.noise import KeyedNoise
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8, 9])])
    >>> noise, half = KeyedNoise(batch.sample_keys), torch.tensor([0.5])
    >>> corrupted = R2FT(max_unit=1).corrupt(batch, noise, special, mask_ratio=half)
    >>> corrupted.input_ids, corrupted.rejected  # repeats token 7; the EOS token replaces the last repetition
    (tensor([[5, 6, 7, 2, 2]]), tensor([[-100, -100, -100,    7,    1]]))
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
        """Coefficients of the terms ``preference`` and ``likelihood``."""
        return {"preference": 1.0, "likelihood": self.likelihood_weight}

    def trained_canvas(self, response_length: int) -> int:
        """Return the length of the longest response with its padding; see :meth:`Objective.trained_canvas`."""
        multiple = self.pad_responses_to or 1
        return -(-response_length // multiple) * multiple

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask responses after a cut and make the rejected texts; see :meth:`Objective.corrupt`.

        ``mask_ratio`` sets the masked share of a response, rounded up.
        """
        if self.pad_responses_to is not None:
            batch = extend_to_multiple(batch, self.pad_responses_to, special_tokens)
        lengths = batch.response_lengths
        if mask_ratio is None:
            cut = batch.prompt_lengths + (noise.uniform("cut", 1)[:, 0] * lengths).long()
        else:
            cut = batch.ends - (mask_probability(noise, 0.0, mask_ratio) * lengths).ceil().long()
        is_masked = batch.in_response & (batch.positions >= cut[:, None])
        rejected = self._make_rejected(batch, cut, noise, special_tokens.eos_token_ids[0])
        num_valid = (cut > 0).sum()  # without text before the cut there is nothing to repeat
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

    def _make_rejected(
        self, batch: ResponseBatch, cut: Int[Tensor, " batch"], noise: KeyedNoise, eos: int
    ) -> Int[Tensor, "batch token"]:
        """Return the rejected tokens by position; ``IGNORE_INDEX`` outside the rejected text."""
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
        """Compute -log sigmoid(beta (w - l)) and -w, with the class docstring's w and l; see :meth:`Objective.loss`."""
        labels = corrupted.labels
        rejected = corrupted.rejected
        assert rejected is not None
        rows, columns = (labels != IGNORE_INDEX).nonzero().unbind(1)
        states = hidden[rows, columns]
        pairs = torch.stack((labels[rows, columns], rejected[rows, columns]), 1)

        def losses(logits: Tensor, pairs: Tensor) -> Tensor:
            return torch.stack([F.cross_entropy(logits, targets, reduction="none") for targets in pairs.unbind(1)])

        values = torch.cat(map_chunks(losses, head, states, pairs, chunk_size=self.chunk_size), 1)
        losses_at = values.new_zeros(2, *labels.shape)  # [true or rejected text, sample, position]
        losses_at[:, rows, columns] = values  # cross_entropy gives 0 for IGNORE_INDEX, outside the rejected text
        is_rejected = rejected != IGNORE_INDEX
        mean_true = -(losses_at[0] * corrupted.weights).sum(1)  # w
        mean_rejected = -losses_at[1].sum(1) / is_rejected.sum(1).clamp(min=1)  # l
        preference = -F.logsigmoid(self.beta * (mean_true - mean_rejected))
        sums = torch.stack((preference.where(is_rejected.any(1), 0.0).sum(), -mean_true.sum()))
        return LossOutput(sums=sums, counts=corrupted.counts.to(sums.dtype), terms=self.terms)
