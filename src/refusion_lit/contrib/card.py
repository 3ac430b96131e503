"""CARD (arXiv 2601.22031): causal models in which both tokens and masks predict the next token.

``CARD`` is the decoder, which fills blocks of masks by confidence. ``SoftTail`` is the objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.branches import rounds_since, text_branch
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, above_or_best
from refusion_lit.engine.requests import Draw, Forward, Steps
from refusion_lit.families.llada.decoder import step_quota
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import random_subset, shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class CARD(Decoder):
    """Fills blocks of masks from left to right, several tokens per forward, with an exact cache of finished blocks.

    A mask is predicted at the position before it. So a forward feeds the token before the block, then the block up to
    the position before its last mask. Masks whose token is more probable than ``threshold`` are filled, and always the
    most probable mask. Filled tokens never change. Attention is causal, so a filled token does not help masks to its
    left. The first forward of a block also computes the previous block again; the KV cache entries then equal ordinary
    causal decoding. With ``block_size: 1`` the decoder equals :class:`Autoregressive`.

    Source: CARD (arXiv 2601.22031), after third-party notes and re-implementations: neither the paper nor the authors'
    code was available, and their settings are unknown. Deliberate differences: the most probable mask is always filled,
    so that every forward commits a token; the prediction at the last mask, for a token beyond the block, is not used.

    Attributes:
        block_size: Masks in a block, K, at least 1.
        threshold: Fill every mask whose token is more probable (tau), in [0, 1].
        max_rounds: Maximum number of forwards per block (T_max); the last forward fills all remaining masks. ``None``:
            no limit.
        num_steps: Number of forwards among which a block's masks are divided equally; a forward fills at least its
            share. ``None``: a forward fills at least a mask. I-DLM's sampler in NeMo AutoModel fills blocks like CARD
            with ``threshold: 1`` and ``num_steps``.

    >>> from refusion_lit.decoding import default_decoder
    >>> default_decoder(SoftTail().traits)
    CARD(block_size=16, threshold=0.9, max_rounds=8, num_steps=None)
    """

    requires = ModelRequirements(attention="causal", predictions=("mask_shifted", "next_token"))
    shares = "all_but_last"
    refuses = "its masks see no text on their right"

    ranges = {"block_size": 1, "threshold": "[0, 1]", "max_rounds": 1, "num_steps": 1}
    block_size: int = 16
    threshold: float = 0.9
    max_rounds: int | None = 8
    num_steps: int | None = None

    def step(self, state: RowState) -> Steps[None]:
        """Run one forward over the block and fill masks."""
        start = state.is_masked.index(True) // self.block_size * self.block_size
        block = range(start, min(start + self.block_size, len(state.tokens)))
        masked = [place for place in block if state.is_masked[place]]
        positions = [state.prompt_length + place for place in masked]
        branch = text_branch(state, state.num_cached, positions[-1], positions, shift=1)
        draw = Draw(sampling=state.sampling, round=state.num_forwards)
        reading = (yield Forward(phase="denoise", branches=(branch,), draw=draw))[0]
        round_number = rounds_since(state, start)
        quota = 1 if self.num_steps is None else step_quota(len(block), self.num_steps, round_number - 1)
        is_last = round_number == self.max_rounds
        chosen = range(len(masked)) if is_last else above_or_best(reading.probabilities, self.threshold, max(quota, 1))
        state.commit([masked[i] for i in chosen], [reading.tokens[i] for i in chosen])
        state.num_cached = state.prompt_length + start
        if len(chosen) < len(masked):
            state.num_cached -= 1  # the block's first mask is predicted by the token before it


@dataclass(frozen=True, kw_only=True)
class SoftTail(Objective):
    """Masks tokens near the end of a response, and predicts every token from all tokens and masks before it.

    With t uniform in [0, 1) and R response tokens, N = max(1, floor(R t)) of the last W = min(R, floor(tail N)) tokens
    are masked, drawn uniformly. Attention is causal, and the state at a position predicts the next token. Targets that
    closely follow masks are hard to predict, so target n has the weight 1 / (beta + S_n). S_n is the sum over earlier
    inputs i of C_i (1 - decay)^(n - 1 - i), where C_i is 0 for a clean token, 1 for a mask, and 2 for a mask after a
    mask. The only term is ``next_token``; its denominator is the sum of the weights.

    Source: CARD (arXiv 2601.22031), after third-party notes and re-implementations: neither the paper nor the authors'
    code was available. ``tail``, ``beta``, ``decay`` and the denominator follow re-implementations. Deliberate
    difference: the prompt is never masked.

    Attributes:
        tail: Width of the tail in masks (lambda), at least 1; 1 masks the whole tail.
        beta: A target without masks before it has the weight 1 / beta; above 0.
        decay: Rate at which the influence of masks fades (p), in (0, 1].

    >>> import torch
    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8, 9])])
    >>> noise, half = KeyedNoise(batch.sample_keys), torch.tensor([0.5])
    >>> SoftTail(tail=1.0).corrupt(batch, noise, special, mask_ratio=half).input_ids
    tensor([[5, 6, 7, 2, 2]])
    """

    trained = ModelTraits(attention="causal", predictions=("mask_shifted", "next_token"))

    term = "next_token"
    ranges = {"tail": 1.0, "beta": "(0, inf)", "decay": "(0, 1]"}
    tail: float = 1.5
    beta: float = 1.0
    decay: float = 0.5

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask tokens in the tails of responses; see :meth:`Objective.corrupt`."""
        ratio = mask_probability(noise, 0.0, mask_ratio)
        num_masks = (batch.response_lengths * ratio).floor().long().clamp(min=1)
        width = (num_masks * self.tail).floor().long().minimum(batch.response_lengths)
        in_tail = batch.in_response & (batch.positions >= (batch.ends - width)[:, None])
        is_masked = random_subset(noise.bits("token_mask", in_tail.shape[1]), in_tail, num_masks)

        labels = shift_left(batch.input_ids.where(batch.in_response, IGNORE_INDEX), IGNORE_INDEX)
        weights = (1 / (self.beta + mask_density(is_masked, self.decay))).where(labels != IGNORE_INDEX, 0.0)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=batch.positions.expand_as(labels),
            labels=labels,
            weights=weights.float(),
            terms=torch.zeros_like(labels),
            counts=weights.sum()[None].double(),
            is_masked=is_masked,
            is_real=batch.is_real,
        )


def mask_density(is_masked: Bool[Tensor, "batch token"], decay: float) -> Float[Tensor, "batch token"]:
    """Return the sum S of :class:`SoftTail` for the target after every position, in float64.

    Args:
        is_masked: Whether a position holds a mask.
        decay: p; a mask d positions before the last input counts (1 - p)^d.
    """
    masks = is_masked.double()
    density = masks * (1 + F.pad(masks, (1, 0))[:, :-1])
    # S_(n+1) = C_n + (1 - p) S_n sums over all earlier positions. Doubling computes the sum in few passes: before a
    # pass, `density` sums over the last `step` positions and `factor` is (1 - p)^step; a pass doubles `step`.
    step = 1
    factor = 1 - decay
    while step < density.shape[1]:
        density = density + factor * F.pad(density, (step, 0))[:, :-step]
        step = 2 * step
        factor = factor * factor
    return density
