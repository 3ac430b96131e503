"""Block diffusion: autoregressive over blocks, masked diffusion inside a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

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

_ORDER_LIMIT = 2**53  # KeyedNoise.bits stays below this


@dataclass(frozen=True, kw_only=True)
class BlockMasked(Objective):
    """Masks of a block are predicted from the whole block and from all earlier blocks as they really are.

    BD3-LM (spec 03, arXiv 2503.09573): one forward over the doubled sequence ``[noisy; clean]`` with repeated
    positions and the three-part mask of :func:`three_part_mask`; outputs of the clean half are not used. Blocks
    are counted from place 0, prompt included, as the block-causal decoders do; only response tokens are masked.
    Each block has its own mask probability t. The term is ``mdm``: the sum over masked tokens of
    cross-entropy / t, divided by the number of response tokens of the batch (spec 03: all tokens are counted, not
    the masked ones; and not sample by sample as in :class:`Masked`).

    Fast-dLLM v2 (spec 05, arXiv 2509.26328) is ``block_size=32, complementary=True, shifted=True,
    fill_blocks_with="mask"``.

    Deliberate differences: t is stratified over a sample's blocks, in random order, and not over the batch's
    (a sample's noise may not depend on its neighbours); blocks are not redrawn when their masked fraction falls
    outside [t_min, t_max]; a sample whose length the block size divides gets no block of
    padding.

    Attributes:
        block_size: Tokens a block, at least 1.
        t_min: Least mask probability (beta), in (0, 1]. Above 0.5 the weight is 1 instead of 1 / t (spec 03).
        t_max: Greatest mask probability (omega), in [t_min, 1]. Only [0.001, 1] gives a likelihood bound.
        complementary: Show each sample twice in the batch, masked where the other view is not, so that each
            response token is a target exactly once; weights are 1. Doubles the rows.
        shifted: The noisy hidden state at place i - 1 predicts the mask at place i. A block's first token is then
            predicted from the noisy block before.
        fill_blocks_with: What a sample's last block is filled up with, as decoders always see whole blocks and a
            short one would tell the model where to end. ``eos``: end-of-sequence tokens, which are response
            tokens, masked and scored. ``mask``: mask tokens that are never scored.
    """

    block_size: int = 8
    t_min: float = 1e-3
    t_max: float = 1.0
    complementary: bool = False
    shifted: bool = False
    fill_blocks_with: Literal["eos", "mask"] = "eos"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained with."""
        super().__post_init__()
        require_option(self.block_size >= 1, "block_size", "at least 1", self.block_size)
        require_option(0 < self.t_min <= 1, "t_min", "a number in (0, 1]", self.t_min)
        require_option(self.t_min <= self.t_max <= 1, "t_max", f"a number in [{self.t_min}, 1]", self.t_max)
        fill = self.fill_blocks_with
        require_option(fill in ("eos", "mask"), "fill_blocks_with", "'eos' or 'mask'", fill)

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; masks predict themselves or, shifted, are predicted by the place before."""
        predictions = ("mask_shifted",) if self.shifted else ("mask",)
        return ModelTraits(attention="block_causal", block_size=self.block_size, predictions=predictions)

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Float[Tensor, " batch"] | None = None,
    ) -> CorruptedBatch:
        """Mask response tokens block by block and append the clean sequence; see :meth:`Objective.corrupt`.

        With ``mask_ratio`` all blocks of a row have that probability and, without ``complementary``, the weight
        1 / ratio: a clipped schedule has no influence.
        """
        mask_token_id = required_mask_id(self, special_tokens)
        batch, lengths = self._with_whole_blocks(batch, special_tokens)
        num_tokens = batch.input_ids.shape[1]
        ratios = self._mask_probabilities(batch, noise, mask_ratio)
        ratios = repeat(ratios, "batch block -> batch (block within)", within=self.block_size)
        _, in_response = response_places(batch)
        is_masked = in_response & (noise.uniform("token_mask", num_tokens) < ratios)

        unweighted = self.complementary or (mask_ratio is None and self.t_min > 0.5)
        weights = torch.ones_like(ratios) if unweighted else 1 / ratios
        num_views = 1
        if self.complementary:
            num_views = 2
            is_masked = torch.cat((is_masked, in_response & ~is_masked))
        clean = batch.input_ids.repeat(num_views, 1)
        labels = clean.where(is_masked, IGNORE_INDEX)
        weights = weights.float().repeat(num_views, 1).where(is_masked, 0.0)
        if self.shifted:
            labels, weights = shift_left(labels, IGNORE_INDEX), shift_left(weights, 0.0)

        # Nothing is predicted and nothing is masked in the clean half.
        labels = functional.pad(labels, (0, num_tokens), value=IGNORE_INDEX)
        num_targets = (labels != IGNORE_INDEX).sum() if self.complementary else batch.response_lengths.sum()
        places = torch.arange(num_tokens, device=labels.device)
        return CorruptedBatch(
            input_ids=torch.cat((clean.masked_fill(is_masked, mask_token_id), clean), dim=1),
            position_ids=places.repeat(2).expand_as(labels),
            labels=labels,
            weights=functional.pad(weights, (0, num_tokens)),
            terms=torch.zeros_like(labels),
            term_names=("mdm",),
            counts=num_targets[None].float(),
            coefficients=(1.0,),
            attention_mask=three_part_mask(num_tokens, self.block_size, lengths.repeat(num_views)),
            is_masked=functional.pad(is_masked, (0, num_tokens)),
            is_real=(places < lengths[:, None]).repeat(num_views, 2),
        )

    def _with_whole_blocks(
        self, batch: ResponseBatch, special_tokens: SpecialTokens
    ) -> tuple[ResponseBatch, Int[Tensor, " batch"]]:
        """Fill up last blocks; return the batch and how many places of each row are to be seen."""
        lengths = batch.prompt_lengths + batch.response_lengths
        lengths = (lengths + self.block_size - 1) // self.block_size * self.block_size
        with_eos = self.fill_blocks_with == "eos"
        token_id = special_tokens.eos_token_ids[0] if with_eos else required_mask_id(self, special_tokens)
        filled = extend_responses(
            batch, lengths - batch.prompt_lengths, token_id=token_id, pad_token_id=special_tokens.pad_token_id
        )
        if not with_eos:
            filled.response_lengths = batch.response_lengths
        return filled, lengths

    def _mask_probabilities(
        self, batch: ResponseBatch, noise: KeyedNoise, mask_ratio: Float[Tensor, " batch"] | None
    ) -> Float[Tensor, "batch block"]:
        """Draw t for every block: uniform in [t_min, t_max), stratified over the blocks with response tokens."""
        num_blocks = batch.input_ids.shape[1] // self.block_size
        if mask_ratio is not None:
            ratio = mask_probability(noise, self.t_min, mask_ratio)
            return repeat(ratio, "batch -> batch block", block=num_blocks)
        blocks = torch.arange(num_blocks, device=batch.input_ids.device)
        first = batch.prompt_lengths // self.block_size
        last = (batch.prompt_lengths + batch.response_lengths - 1) // self.block_size
        in_response = (blocks >= first[:, None]) & (blocks <= last[:, None])
        keys = noise.bits("block_stratum", num_blocks).where(in_response, _ORDER_LIMIT)
        stratum = keys.argsort(dim=1, stable=True).argsort(dim=1)
        uniform = (stratum + noise.uniform("block_ratio", num_blocks)) / (last - first + 1)[:, None]
        return uniform.clamp(max=1) * (self.t_max - self.t_min) + self.t_min


def three_part_mask(
    num_tokens: int, block_size: int, lengths: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch doubled doubled"]:
    """Build the attention of a doubled sequence ``[noisy; clean]`` (spec 03).

    A noisy token sees its own noisy block and all clean blocks before it; a clean token sees the clean blocks up to
    and including its own. Nothing clean sees anything noisy.

    Args:
        num_tokens: Tokens of one half.
        block_size: Tokens a block; blocks are counted from place 0 of each half.
        lengths: Places of one half that are real in each row; the rest is seen by nobody but itself.
    """
    places = torch.arange(num_tokens, device=lengths.device).repeat(2)
    is_clean = torch.arange(2 * num_tokens, device=lengths.device) >= num_tokens
    block = places // block_size
    query, key = block[:, None], block[None]
    same_half = is_clean[:, None] == is_clean
    allowed = (same_half & (query == key)) | (is_clean & ((query > key) | (is_clean[:, None] & (query == key))))
    real = (places < lengths[:, None])[:, None]
    return (allowed & real) | torch.eye(2 * num_tokens, dtype=torch.bool, device=lengths.device)
