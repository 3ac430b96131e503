"""Discrete diffusion forcing: blocks that see earlier, less masked blocks, as D2F is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import extend_to_multiple
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_number


@dataclass(frozen=True, kw_only=True)
class DiffusionForcing(Objective):
    """Predicts the masks of a block from the whole block and from all earlier blocks, which hold fewer masks.

    D2F (arXiv 2508.09192). The response is cut in N blocks of ``block_size`` from its start; its last block is filled
    with end-of-sequence tokens. Mask probabilities rise from block to block: p_0 is uniform in [t_min, t_max), and
    p_b = p_(b-1) + u_b (t_max - p_0) / (N - 1) with u_b uniform in [0, 1). Response tokens are masked independently
    with their block's p. The prompt sees itself; a block sees the prompt, itself and all earlier blocks, masks
    included. There is no clean copy, so a sample costs its own length. The term is ``mdm``, the mean over masked tokens
    of the cross-entropy / p.

    Deliberate difference: the targets are the response's tokens, so that a model can be trained from any weights; D2F
    trains adapters on the distributions that the model without them predicts with bidirectional attention.

    Attributes:
        block_size: Number of tokens in a block, at least 1; the decoder's may be another one.
        t_min: Smallest mask probability, in (0, 1]; the paper's text has 0.3, the released program 0.2.
        t_max: Largest mask probability, in [t_min, 1].
    """

    term = "mdm"
    ranges = {"block_size": 1, "t_min": "(0, 1]"}
    block_size: int = 16
    t_min: float = 0.2
    t_max: float = 0.7

    def __post_init__(self) -> None:
        """Refuse options that cannot be trained with."""
        super().__post_init__()
        require_number("objective.t_max", self.t_max, f"[{self.t_min}, 1]")

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention after a prompt of one block; masks predict themselves."""
        return ModelTraits(
            attention="block_causal", block_size=self.block_size, predictions=("mask",), prompt_is_block=True
        )

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens, later blocks more than earlier ones; see :meth:`Objective.corrupt`.

        With ``mask_ratio``, all blocks of a row have that probability.
        """
        size = self.block_size
        batch = extend_to_multiple(batch, size, special_tokens)
        num_blocks = batch.response_lengths // size
        positions, in_response, is_real = batch.positions, batch.in_response, batch.is_real
        block = ((positions - batch.prompt_lengths[:, None]) // size).clamp(min=0)
        ratios = self._ratios(num_blocks, -(-len(positions) // size), noise, mask_ratio).gather(1, block)
        is_masked = in_response & (noise.uniform("token_mask", len(positions)) < ratios)

        stops = batch.prompt_lengths[:, None] + torch.where(in_response, (block + 1) * size, 0)
        seen = torch.stack((torch.zeros_like(stops), stops), -1)
        itself = torch.stack((positions, positions + 1), -1)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=positions.expand_as(is_masked),
            labels=batch.input_ids.where(is_masked, IGNORE_INDEX),
            weights=(1 / ratios).float().where(is_masked, 0.0),
            terms=torch.zeros_like(batch.input_ids),
            counts=is_masked.sum()[None].float(),
            visible=torch.where(is_real[..., None], seen, itself)[:, :, None],
            is_masked=is_masked,
            is_real=is_real,
        )

    def _ratios(
        self,
        num_blocks: Int[Tensor, " batch"],
        most: int,
        noise: KeyedNoise,
        mask_ratio: MaskRatio,
    ) -> Float[Tensor, "batch block"]:
        """Draw the mask probability of each of ``most`` blocks; those of a sample do not fall from left to right."""
        if mask_ratio is not None:
            return repeat(mask_probability(noise, 0.0, mask_ratio), "sample -> sample block", block=most)
        uniform = noise.uniform("block_ratio", most)
        first = self.t_min + (self.t_max - self.t_min) * uniform[:, :1]
        steps = torch.cat((torch.zeros_like(first), uniform[:, 1:]), 1)
        rise = (self.t_max - first) / (num_blocks[:, None] - 1).clamp(min=1)
        return (first + rise * steps.cumsum(1)).clamp(max=self.t_max)
