"""Dual-stream masking: a clean stream and a masked one, both causal, as WeDLM is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import (
    MaskRatio,
    Objective,
    mask_probability,
    random_subset,
    required_mask_id,
    response_positions,
)
from refusion_lit.learning.text_order import shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens

_MIN_RATIO = 1e-8


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

    ranges = {"block_size": 1, "ar_weight": 0.0}
    block_size: int = 32
    ar_weight: float = 1.0

    @property
    def traits(self) -> ModelTraits:
        """Causal attention; masks predict themselves, clean tokens the next one."""
        return ModelTraits(attention="causal", predictions=("mask", "next_token"))

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
        positions, in_response = response_positions(batch)
        lengths = batch.prompt_lengths + batch.response_lengths
        is_real = positions < lengths[:, None]
        is_masked, weights = self._masked(in_response, noise, mask_ratio)

        # Clean tokens of a block, then its masks, each in text order; padding stays after them.
        key = torch.where(is_real, 2 * (positions // size) + is_masked, 2 * num_tokens)
        order = key.argsort(dim=1, stable=True)
        own = batch.input_ids.where(is_masked, IGNORE_INDEX)
        following = shift_left(batch.input_ids.where(in_response, IGNORE_INDEX), IGNORE_INDEX)
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
            visible=three_part_ranges(num_tokens, size, lengths, causal=True),
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
        maskable = _in_blocks(F.pad(in_response, (0, num_blocks * size - num_tokens)), size)
        order = _in_blocks(noise.bits("token_order", num_blocks * size), size)
        is_masked = random_subset(order, maskable, (maskable.sum(-1) * ratio).round())
        weights = repeat((1 / ratio).float(), "sample block -> sample (block within)", within=size)[:, :num_tokens]
        is_masked = rearrange(is_masked, "sample block within -> sample (block within)")[:, :num_tokens]
        return is_masked, weights.where(is_masked, 0.0)


def _in_blocks(values: Shaped[Tensor, "batch token"], size: int) -> Shaped[Tensor, "batch block within"]:
    return rearrange(values, "sample (block within) -> sample block within", within=size)
