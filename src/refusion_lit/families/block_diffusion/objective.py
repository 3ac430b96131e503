"""Trains block diffusion: autoregressive over blocks, masked diffusion inside a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import extend_responses, shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require, require_number

_ORDER_LIMIT = 2**53  # KeyedNoise.bits stays below this
_MIN_PROBABILITY = 1e-3
"""Weights 1 / t are computed with at least this t, as in BD3-LM's program."""


@dataclass(frozen=True, kw_only=True)
class BlockMasked(Objective):
    """Predicts a block's masks from the noisy block itself and all earlier clean blocks.

    BD3-LM (arXiv 2503.09573): a forward over the doubled sequence ``[noisy; clean]`` with repeated position ids and the
    three-part mask of :func:`three_part_ranges`; the clean half's outputs are not used. Blocks are counted from
    position 0, prompt included, as in block-causal decoders; only response tokens are masked. Every block draws a mask
    probability t. The term ``mdm`` sums cross-entropy / t over masked tokens and divides by the batch's number of
    response tokens, masked or not. :class:`Masked` normalises sample by sample instead.

    Fast-dLLM v2 (arXiv 2509.26328) is ``block_size=32, complementary=True, shifted=True, fill_blocks_with="mask",
    stratified=False``. BD3-LM's training divides by ``denominator="all_tokens"``.

    Deliberate differences: the noise interval is fixed instead of searched during training. Masks are drawn once, not
    again until their share lies in the interval. t is stratified over a sample's blocks in random order, not over the
    batch's blocks: a sample's noise must not depend on other samples. A sample whose length is a multiple of the block
    size gets no padding block.

    Attributes:
        block_size: Tokens per block, at least 1.
        t_min: Smallest mask probability (beta), in (0, 1]. Above 0.5 the weight is 1 instead of 1 / t, as in the
            authors' program.
        t_max: Largest mask probability (omega), in [t_min, 1]. Only [0.001, 1] gives a likelihood bound.
        stratified: Stratify t over a sample's blocks; ``False``: draw t independently, as Fast-dLLM v2 does.
        denominator: Tokens whose number divides the loss: ``response``, masked or not, or ``all_tokens``, prompt
            included (BD3-LM's training).
        complementary: Show a sample in two views; the second view masks the tokens that the first does not. Every
            response token is then a target exactly once, and weights are 1. Doubles the rows.
        shifted: The noisy hidden state at position i - 1 predicts the mask at position i. A block's first token is
            then predicted from the noisy block before it.
        fill_blocks_with: Token that completes a sample's last block. Decoders always see whole blocks, and a short
            block would reveal where the text ends. ``eos``: EOS tokens, masked and scored like other response tokens.
            ``mask``: mask tokens, never scored.

    >>> import torch
    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> noise = KeyedNoise(batch.sample_keys)
    >>> corrupted = BlockMasked(block_size=2).corrupt(batch, noise, special, mask_ratio=torch.ones(1))
    >>> corrupted.input_ids, corrupted.position_ids
    (tensor([[5, 2, 2, 2, 5, 6, 7, 8]]), tensor([[0, 1, 2, 3, 0, 1, 2, 3]]))
    """

    term = "mdm"
    ranges = {"block_size": 1, "t_min": "(0, 1]"}
    block_size: int = 8
    t_min: float = 1e-3
    t_max: float = 1.0
    stratified: bool = True
    denominator: Literal["response", "all_tokens"] = "response"
    complementary: bool = False
    shifted: bool = False
    fill_blocks_with: Literal["eos", "mask"] = "eos"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("objective.t_max", self.t_max, f"[{self.t_min}, 1]")
        weighted = not self.complementary or self.denominator == "response"
        fix = "use 'response', which counts every token once although it is in two views"
        require(weighted, "objective.denominator", "'response' with complementary", self.denominator, fix)

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; a mask is predicted at its position or, ``shifted``, at the position before."""
        predictions = ("mask_shifted",) if self.shifted else ("mask",)
        return ModelTraits(attention="block_causal", block_size=self.block_size, predictions=predictions)

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens block by block and append the clean sequence; see :meth:`Objective.corrupt`.

        With ``mask_ratio``, all blocks of a row have this probability and, without ``complementary``, the weight
        1 / ratio; the noise interval has no influence.
        """
        mask_token_id = required_mask_id(self, special_tokens)
        batch, lengths = self._with_whole_blocks(batch, special_tokens)
        num_tokens = batch.input_ids.shape[1]
        times = self._times(batch, noise, mask_ratio)
        ratios = repeat(times, "sample block -> sample (block within)", within=self.block_size)
        ratios = ratios.clamp(min=_MIN_PROBABILITY)
        positions, in_response = batch.positions, batch.in_response
        is_masked = in_response & (noise.uniform("token_mask", num_tokens) < ratios)

        masks = [is_masked, in_response & ~is_masked] if self.complementary else [is_masked]
        is_masked = rearrange(masks, "view sample token -> (view sample) token")
        clean = repeat(batch.input_ids, "sample token -> (view sample) token", view=len(masks))
        labels = clean.where(is_masked, IGNORE_INDEX)
        unweighted = self.complementary or (mask_ratio is None and self.t_min > 0.5)
        weights = torch.ones_like(ratios) if unweighted else 1 / ratios
        weights = repeat(weights.float(), "sample token -> (view sample) token", view=len(masks)).where(is_masked, 0.0)
        if self.shifted:
            labels = shift_left(labels, IGNORE_INDEX)
            weights = shift_left(weights, 0.0)

        # The clean half is neither masked nor labelled.
        labels = F.pad(labels, (0, num_tokens), value=IGNORE_INDEX)
        num_targets = (labels != IGNORE_INDEX).sum() if self.complementary else batch.response_lengths.sum()
        if self.denominator == "all_tokens":
            num_targets = num_targets + batch.prompt_lengths.sum()
        is_real = positions < lengths[:, None]
        lengths = repeat(lengths, "sample -> (view sample)", view=len(masks))
        return CorruptedBatch(
            input_ids=torch.cat((clean.masked_fill(is_masked, mask_token_id), clean), dim=1),
            position_ids=repeat(positions, "token -> (half token)", half=2).expand_as(labels),
            labels=labels,
            weights=F.pad(weights, (0, num_tokens)),
            terms=torch.zeros_like(labels),
            counts=num_targets[None].float(),
            visible=three_part_ranges(num_tokens, self.block_size, lengths),
            is_masked=F.pad(is_masked, (0, num_tokens)),
            is_real=repeat(is_real, "sample token -> (view sample) (half token)", view=len(masks), half=2),
            num_views=len(masks),
        )

    def _with_whole_blocks(
        self, batch: ResponseBatch, special_tokens: SpecialTokens
    ) -> tuple[ResponseBatch, Int[Tensor, " batch"]]:
        """Complete the last blocks; return the batch and the number of visible tokens by row."""
        lengths = (batch.ends + self.block_size - 1) // self.block_size * self.block_size
        token_id = None if self.fill_blocks_with == "eos" else required_mask_id(self, special_tokens)
        filled = extend_responses(batch, lengths - batch.prompt_lengths, special_tokens, token_id=token_id)
        if token_id is not None:
            filled.response_lengths = batch.response_lengths
        return filled, lengths

    def _times(self, batch: ResponseBatch, noise: KeyedNoise, mask_ratio: MaskRatio) -> Float[Tensor, "batch block"]:
        """Draw t for every block, uniform in [t_min, t_max); if stratified, over the blocks with response tokens."""
        num_blocks = batch.input_ids.shape[1] // self.block_size
        if mask_ratio is not None:
            ratio = mask_probability(noise, self.t_min, mask_ratio)
            return repeat(ratio, "sample -> sample block", block=num_blocks)
        uniform = noise.uniform("block_ratio", num_blocks)
        if not self.stratified:
            return uniform * (self.t_max - self.t_min) + self.t_min
        blocks = torch.arange(num_blocks, device=batch.input_ids.device)
        first = batch.prompt_lengths // self.block_size
        last = (batch.ends - 1) // self.block_size
        in_response = (blocks >= first[:, None]) & (blocks <= last[:, None])
        keys = noise.bits("block_stratum", num_blocks).where(in_response, _ORDER_LIMIT)
        stratum = keys.argsort(dim=1, stable=True).argsort(dim=1)
        uniform = (stratum + uniform) / (last - first + 1)[:, None]
        return uniform.clamp(max=1) * (self.t_max - self.t_min) + self.t_min


def three_part_ranges(
    num_tokens: int,
    block_size: int,
    lengths: Int[Tensor, " batch"],
    *,
    causal: bool | Literal["clean"] = False,
) -> Int[Tensor, "batch doubled range 2"]:
    """Return the ranges that tokens in a doubled sequence ``[noisy; clean]`` see.

    As in BD3-LM (arXiv 2503.09573) or, if ``causal``, in WeDLM (arXiv 2512.22737). A noisy token sees its noisy block
    and all earlier clean blocks. A clean token sees the clean blocks up to and including its block, and no noisy token.

    Args:
        num_tokens: Number of tokens in a half.
        block_size: Tokens per block; blocks are counted from position 0 of both halves.
        lengths: Number of real tokens in a half, by row. Padding sees itself and clean tokens.
        causal: Inside a block, let a token see only earlier tokens and itself; ``clean``: in the clean half alone.
    """
    tokens = torch.arange(2 * num_tokens, device=lengths.device)
    lengths = lengths[:, None]
    positions = tokens % num_tokens
    is_noisy = tokens < num_tokens
    is_real = positions < lengths
    begin = positions // block_size * block_size
    ends = (begin + block_size, positions + 1)
    end = ends[causal is True]  # where a noisy token's view of its block ends
    clean_stop = num_tokens + torch.where(is_noisy, begin, ends[bool(causal)]).minimum(lengths)
    clean = torch.stack((torch.full_like(clean_stop, num_tokens), clean_stop), -1)
    # A clean token's block is in the clean range; padding also sees itself.
    start = torch.where(is_real, begin, tokens)
    stop = torch.where(is_real, torch.where(is_noisy, end.minimum(lengths), begin), tokens + 1)
    return torch.stack((torch.stack((start, stop), -1), clean), 2)
