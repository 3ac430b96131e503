"""WeDLM (arXiv 2512.22737): causal attention, masks that predict themselves, a sliding window.

The decoder ``WeDLM``, the objective ``DualStream``, a clean stream and a masked one, and the published checkpoints, a
Qwen2.5 (7B) and a Qwen3 (8B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, above_or_best, max_length
from refusion_lit.engine.drafting import text_between
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import random_subset, shift_left
from refusion_lit.modeling.formats import CheckpointFormat, register
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens

_MIN_RATIO = 1e-8


@dataclass(frozen=True, kw_only=True)
class _WeDLMFormat(CheckpointFormat):
    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Name Qwen3 for a config with normalised queries and keys, else Qwen2."""
        return super().library_options(values) | {"model_type": "qwen3" if values.get("qk_norm", False) else "qwen2"}


register(
    _WeDLMFormat(
        name="wedlm",
        family="WeDLM 7B and 8B",
        model_type="wedlm",
        base="qwen3",
        attention="causal",
        predictions=("mask", "next_token"),
        mask_tokens=("<|mask|>", "<|MASK|>"),
        decoder="WeDLM",
    )
)


@dataclass(frozen=True, kw_only=True)
class WeDLM(Decoder):
    """Fills the masks of a sliding window by entropy and caches the leading run of filled ones one forward later.

    A forward feeds the window's filled tokens in text order and then its masks in text order, with their positions in
    the text. Causal attention over that sequence shows each mask all filled tokens and the masks to its left. A filled
    token never changes. The run of filled tokens at the window's start follows cached text directly. Its keys and
    values in this forward are therefore those of ordinary causal decoding: they stay in the cache, and the window moves
    past them. Other filled tokens are computed again in each forward.

    Source: streaming parallel decoding of WeDLM (arXiv 2512.22737, algorithm 1) as in its released engine. Deliberate
    differences: the first forward computes the prompt and the first window, where the engine computes the prompt alone;
    no forward follows the one that completes the text; temperature acts before top-p, not after; the mask token is
    never drawn. As in the engine, the window is refilled in the same forward that caches its leading tokens: there are
    up to 2 W tokens, and always reaches W places from its first mask (the paper's algorithm refills it after that
    forward). The window reaches beyond ``max_new_tokens``; what stands there is not returned.

    Attributes:
        window_size: Masks in the window, W (``wedlm_window_size``); the paper's tables have 6.
        entropy_threshold: Fill every mask whose entropy in nats plus penalty is below this, and always the best one
            (tau, ``wedlm_entropy_threshold``); the comparison is strict. ``None``: one token per forward, as in the
            paper's tables.
        position_penalty: Added to a mask's entropy for each position between it and the first mask (lambda,
            ``wedlm_pos_penalty_factor``), at least 0; the paper's tables have 0.1.
        ignore_right_context: Accept given tokens beyond the window of a token to generate, which the model does not see
            while it fills that one.
    """

    requires = ModelRequirements(attention="causal", predictions=("mask",))
    shares = "all"

    ranges = {"window_size": 1, "entropy_threshold": "[-inf, inf]", "position_penalty": 0.0}
    window_size: int = 16
    entropy_threshold: float | None = 0.4
    position_penalty: float = 0.02
    ignore_right_context: bool = False

    def refusal(self, prompt: Prompt) -> str | None:
        """Refuse given tokens that the first window does not reach, unless ``ignore_right_context``."""
        if self.ignore_right_context or not prompt.num_to_fill:
            return None
        if prompt.given_length - 1 - prompt.given.index(None) < self.window_size:
            return None
        return (
            f"its model sees a window of {self.window_size} tokens and what is before it, and text is given after that "
            "(set ignore_right_context: true to fill spans without it)"
        )

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a canvas as long as the longest response, and the window's masks beyond."""
        length = max_length(prompt, sampling, special_tokens) + self.window_size
        return RowState(prompt, sampling, special_tokens, length)

    def step(self, state: RowState) -> Steps[None]:
        """Run one forward over the window; fill masks and keep the KV cache entries of the leading tokens."""
        start = max(state.num_cached - state.prompt_length, 0)
        first_mask = state.is_masked.index(True)
        stop = first_mask + self.window_size
        places = [place for place in range(start, stop) if state.is_masked[place]]
        filled = [place for place in range(start, stop) if not state.is_masked[place]]
        branch = self._branch(state, [*filled, *places], len(places))
        draw = Draw(sampling=state.sampling, round=state.num_forwards, statistic="entropy")
        readings = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        state.num_cached = state.prompt_length + first_mask
        threshold = math.inf if self.entropy_threshold is None else -self.entropy_threshold
        negated = [
            -(entropy + self.position_penalty * (place - places[0]))
            for place, entropy in zip(places, readings[0].statistic, strict=True)
        ]
        chosen = above_or_best(negated, threshold)
        state.commit([places[i] for i in chosen], [readings[0].tokens[i] for i in chosen])

    def _branch(self, state: RowState, window: Sequence[int], num_masks: int) -> Branch:
        """Return the prompt's tokens that are not cached and the window's places, of which the last ones are masks."""
        start = state.num_cached
        positions = [*range(start, state.prompt_length), *(state.prompt_length + place for place in window)]
        text = text_between(state, start, max(positions) + 1)
        return Branch(
            tokens=[text[position - start] for position in positions],
            positions=positions,
            visible=((0, start),),
            write_at=start,
            draft_at=range(len(positions) - num_masks, len(positions)),
        )


@dataclass(frozen=True, kw_only=True)
class DualStream(Objective):
    """Predicts the masks of a block from its clean tokens, the masks before them, and all earlier clean blocks.

    WeDLM (arXiv 2512.22737): one forward over ``[prediction; memory]`` with repeated position ids. The memory stream is
    the clean text. In the prediction stream a share gamma of each block's response tokens, uniform in [0, 1) and drawn
    for each block alone, is masked: exactly that share, rounded, at random places. The masks then move after the
    block's clean tokens, with their position ids. Attention is causal: a prediction token sees its block up to itself
    and the memory of all earlier blocks; the memory sees itself. Blocks are counted from position 0, prompt included.

    Terms: ``mdm``, the mean over masks of the cross-entropy with weights 1 / gamma, over the weights' sum (the public
    trainer's; the paper writes a plain sum); ``ar``, the mean cross-entropy of the memory's next-token predictions. The
    loss is (mdm + ar_weight * ar) / (1 + ar_weight).

    Deliberate difference: the public trainer can append more learnable end-of-turn tokens to a response
    (``num_learnable_im_end``); here a response ends with one EOS token.

    Attributes:
        block_size: Number of tokens in a block, at least 1; decoders need not know it.
        ar_weight: Weight of the next-token term against the masked one (``ar_loss_weight``), at least 0.
    """

    trained = ModelTraits(attention="causal", predictions=("mask", "next_token"))

    ranges = {"block_size": 1, "ar_weight": 0.0}
    block_size: int = 32
    ar_weight: float = 1.0

    @property
    def terms(self) -> Mapping[str, float]:
        """The masked and the next-token term."""
        return {"mdm": 1 / (1 + self.ar_weight), "ar": self.ar_weight / (1 + self.ar_weight)}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask a share of each block, move its masks to its end, append the clean text; see :meth:`Objective.corrupt`.

        With ``mask_ratio``, all blocks of a row have that share.
        """
        mask_token_id = required_mask_id(self, special_tokens)
        num_tokens = batch.input_ids.shape[1]
        size = self.block_size
        positions, is_real = batch.positions, batch.is_real
        is_masked, weights = self._masked(batch.in_response, noise, mask_ratio)

        # Clean tokens of a block, then its masks, each in text order; padding stays after them.
        key = torch.where(is_real, 2 * (positions // size) + is_masked, 2 * num_tokens)
        order = key.argsort(dim=1, stable=True)
        own = batch.input_ids.where(is_masked, IGNORE_INDEX)
        following = shift_left(batch.input_ids.where(batch.in_response, IGNORE_INDEX), IGNORE_INDEX)
        follows = following != IGNORE_INDEX
        none = torch.zeros_like(is_masked)
        return CorruptedBatch(
            input_ids=torch.cat((batch.input_ids.masked_fill(is_masked, mask_token_id).gather(1, order),
                                 batch.input_ids), 1),
            position_ids=torch.cat((order, positions.expand_as(order)), 1),
            labels=torch.cat((own.gather(1, order), following), 1),
            weights=torch.cat((weights.gather(1, order), follows.float()), 1),
            terms=torch.cat((none, ~none), 1).long(),
            # Weights are no integers: a sum in float32 would depend on how a step is cut into micro-batches.
            counts=torch.stack((weights.double().sum(), follows.sum().double())),
            visible=three_part_ranges(num_tokens, size, batch.ends, causal=True),
            is_masked=torch.cat((is_masked.gather(1, order), none), 1),
            is_real=torch.cat((is_real, is_real), 1),
        )  # fmt: skip

    def _masked(
        self, in_response: Bool[Tensor, "batch token"], noise: KeyedNoise, mask_ratio: MaskRatio
    ) -> tuple[Bool[Tensor, "batch token"], Float[Tensor, "batch token"]]:
        """Draw which tokens are masked, exactly a share of each block; return them and their weights."""
        num_tokens = in_response.shape[1]
        size = self.block_size
        num_blocks = -(-num_tokens // size)
        if mask_ratio is None:
            ratio = noise.uniform("block_ratio", num_blocks).clamp(min=_MIN_RATIO)
        else:
            ratio = mask_probability(noise, _MIN_RATIO, mask_ratio)[:, None].expand(-1, num_blocks)
        maskable = F.pad(in_response, (0, num_blocks * size - num_tokens)).unflatten(1, (num_blocks, size))
        order = noise.bits("token_order", num_blocks * size).unflatten(1, (num_blocks, size))
        is_masked = random_subset(order, maskable, (maskable.sum(-1) * ratio).round()).flatten(1)[:, :num_tokens]
        weights = (1 / ratio).float().repeat_interleave(size, 1)[:, :num_tokens]
        return is_masked, weights.where(is_masked, 0.0)
