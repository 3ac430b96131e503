"""Block diffusion: autoregressive over blocks, masked diffusion inside a block, and its variant that learns to edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """Predicts the masks of a block from the whole block and from all earlier blocks, unmasked.

    BD3-LM (arXiv 2503.09573): one forward over the doubled sequence ``[noisy; clean]`` with repeated position ids and
    the three-part mask of :func:`three_part_ranges`; outputs of the clean half are not used. Blocks are counted from
    position 0, prompt included, as the block-causal decoders do; only response tokens are masked. Each block has its
    own mask probability t. The term is ``mdm``: the sum over masked tokens of cross-entropy / t, divided by the number
    of response tokens of the batch, masked or not (unlike :class:`Masked`, which normalises sample by sample).

    Fast-dLLM v2 (arXiv 2509.26328) is ``block_size=32, complementary=True, shifted=True, fill_blocks_with="mask",
    stratified=False``. BD3-LM's training divides by ``denominator="all_tokens"``.

    Deliberate differences: the noise interval is fixed and not searched during training, and masks are not drawn again
    until their fraction lies in it. t is stratified over a sample's blocks, in random order, and not over the batch's
    blocks: a sample's noise must not depend on its neighbours. A sample whose length is a multiple of the block size
    gets no block of padding.

    Attributes:
        block_size: Number of tokens in a block, at least 1.
        t_min: Smallest mask probability (beta), in (0, 1]. Above 0.5 the weight is 1 instead of 1 / t, as in the
            authors' program.
        t_max: Largest mask probability (omega), in [t_min, 1]. Only [0.001, 1] gives a likelihood bound.
        stratified: Stratify t over a sample's blocks, the default; ``False`` draws each block's t independently, as
            Fast-dLLM v2 does.
        denominator: Tokens that the loss is divided by: those of the ``response``, masked or not, or ``all_tokens``,
            the prompt's too (BD3-LM's training).
        complementary: Show each sample in two views, the second masked where the first is not, so that each response
            token is a target exactly once; weights are 1. Doubles the rows.
        shifted: The noisy hidden state at position i - 1 predicts the mask at position i. A block's first token is
            then predicted from the noisy block before it.
        fill_blocks_with: Token that completes a sample's last block: decoders always see whole blocks, and a short one
            would reveal where to end. ``eos``: end-of-sequence tokens, which are response tokens, masked and scored.
            ``mask``: mask tokens that are never scored.
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
        fix = "use 'response', which counts each token of the two views once"
        require(weighted, "objective.denominator", "'response' with complementary", self.denominator, fix)

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; masks predict themselves or, shifted, are predicted by the position before."""
        predictions = ("mask_shifted",) if self.shifted else ("mask",)
        return ModelTraits(attention="block_causal", block_size=self.block_size, predictions=predictions)

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens block by block and append the clean sequence; see :meth:`Objective.corrupt`.

        With ``mask_ratio``, all blocks of a row have that probability and, without ``complementary``, the weight
        1 / ratio: a clipped interval has no influence.
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
        """Complete the last blocks; return the batch and the number of visible tokens of each row."""
        lengths = (batch.ends + self.block_size - 1) // self.block_size * self.block_size
        token_id = None if self.fill_blocks_with == "eos" else required_mask_id(self, special_tokens)
        filled = extend_responses(batch, lengths - batch.prompt_lengths, special_tokens, token_id=token_id)
        if token_id is not None:
            filled.response_lengths = batch.response_lengths
        return filled, lengths

    def _times(self, batch: ResponseBatch, noise: KeyedNoise, mask_ratio: MaskRatio) -> Float[Tensor, "batch block"]:
        """Draw t for every block: uniform in [t_min, t_max), stratified over the blocks with response tokens or not."""
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
    num_tokens: int, block_size: int, lengths: Int[Tensor, " batch"], *, causal: bool = False
) -> Int[Tensor, "batch doubled range 2"]:
    """Return what the tokens of a doubled sequence ``[noisy; clean]`` see.

    As in BD3-LM (arXiv 2503.09573) or, if ``causal``, in WeDLM (arXiv 2512.22737). A noisy token sees its own noisy
    block and all clean blocks before it. A clean token sees the clean blocks up to and including its own, and nothing
    noisy.

    Args:
        num_tokens: Number of tokens in one half.
        block_size: Number of tokens in a block; blocks are counted from position 0 of each half.
        lengths: Number of real tokens in one half of each row. Padding sees itself and clean tokens.
        causal: Inside a block, let a token see only the tokens before it and itself.
    """
    tokens = torch.arange(2 * num_tokens, device=lengths.device)
    lengths = lengths[:, None]
    positions = tokens % num_tokens
    is_noisy = tokens < num_tokens
    is_real = positions < lengths
    begin = positions // block_size * block_size
    end = positions + 1 if causal else begin + block_size
    clean_stop = num_tokens + torch.where(is_noisy, begin, end).minimum(lengths)
    clean = torch.stack((torch.full_like(clean_stop, num_tokens), clean_stop), -1)
    # A clean token's own block is in that range; padding sees itself besides.
    start = torch.where(is_real, begin, tokens)
    stop = torch.where(is_real, torch.where(is_noisy, end.minimum(lengths), begin), tokens + 1)
    return torch.stack((torch.stack((start, stop), -1), clean), 2)


@dataclass(frozen=True, kw_only=True)
class EditableBlockMasked(BlockMasked):
    """Block diffusion in which some visible tokens of the noisy copy are wrong, and are predicted too.

    As :class:`BlockMasked`, and: a share e of each sample's unmasked response tokens, uniform in [0, ``max_replaced``),
    is replaced by random other tokens, independently; the true token is the target there. A share of ``kept`` of the
    unmasked tokens that are right is predicted as well, so that the model learns to leave them alone. Terms: ``mdm`` as
    before; ``edit`` and ``keep``, means over their tokens.

    Source: the two streams of LLaDA2.1 (arXiv 2602.08676), mask-to-token and token-to-token. The report gives neither
    rates nor weights: those here are ours. Deliberate differences: wrong tokens are uniform ones only, where the report
    also feeds the model's own drafts (its multi-turn forward).

    Attributes:
        max_replaced: Upper end of the share of unmasked tokens that are replaced, in [0, 1].
        kept: Share of the right unmasked tokens that are targets, in [0, 1].
        edit_weight: Coefficient of the term ``edit``, at least 0.
        keep_weight: Coefficient of the term ``keep``, at least 0.
    """

    ranges = {"max_replaced": "[0, 1]", "kept": "[0, 1]", "edit_weight": 0.0, "keep_weight": 0.0}
    max_replaced: float = 0.1
    kept: float = 0.1
    edit_weight: float = 0.5
    keep_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("complementary", "shifted"):
            fix = "leave it out, or train with BlockMasked"
            require(not getattr(self, name), f"objective.{name}", "false with visible tokens as targets", True, fix)

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; masks and visible tokens predict what belongs at their place."""
        return replace(super().traits, predictions=("mask", "visible"))

    @property
    def terms(self) -> Mapping[str, float]:
        """The masked-diffusion term, and those of wrong and of right visible tokens."""
        return {"mdm": 1.0, "edit": self.edit_weight, "keep": self.keep_weight}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens block by block, replace some others; see :meth:`Objective.corrupt`."""
        masked = super().corrupt(batch, noise, special_tokens, mask_ratio=mask_ratio)
        assert masked.is_masked is not None
        num_tokens = masked.input_ids.shape[1] // 2
        clean = masked.input_ids[:, num_tokens:]
        whole = replace(batch, input_ids=clean)
        if self.fill_blocks_with == "eos":  # these are response tokens too
            whole.response_lengths = batch.response_lengths + (-batch.ends) % self.block_size
        visible = whole.in_response & ~masked.is_masked[:, :num_tokens]
        share = self.max_replaced * noise.uniform("replaced_share", 1)
        is_replaced = visible & (noise.uniform("replaced", num_tokens) < share)
        is_kept = visible & ~is_replaced & (noise.uniform("kept", num_tokens) < self.kept)
        others = other_tokens(clean, noise.uniform("replacement", num_tokens), special_tokens)

        is_target = F.pad(is_replaced | is_kept, (0, num_tokens))
        terms = F.pad(is_replaced.long() + 2 * is_kept, (0, num_tokens))
        counts = torch.stack((is_replaced.sum(), is_kept.sum())).to(masked.counts.dtype)
        return replace(
            masked,
            input_ids=torch.cat((others.where(is_replaced, masked.input_ids[:, :num_tokens]), clean), 1),
            labels=torch.where(is_target, torch.cat((clean, clean), 1), masked.labels),
            weights=torch.where(is_target, 1.0, masked.weights),
            terms=terms,
            counts=torch.cat((masked.counts, counts)),
        )


def other_tokens(
    tokens: Int[Tensor, "batch token"], uniform: Float[Tensor, "batch token"], special_tokens: SpecialTokens
) -> Int[Tensor, "batch token"]:
    """Return uniformly drawn ids that differ from the given ones and that a decoder may produce.

    Args:
        tokens: Ids that are not to be drawn at their place.
        uniform: Numbers in [0, 1).
        special_tokens: Ids that are never drawn.
    """
    size = special_tokens.vocab_size
    banned = special_tokens.banned_token_ids
    skipped = [torch.full_like(tokens, token) for token in banned]
    is_new = torch.stack([tokens != token for token in banned]).all(0) if banned else torch.ones_like(tokens).bool()
    skipped.append(tokens.where(is_new, size))  # a token that is skipped anyway takes no further id away
    num_left = size - len(banned) - is_new.long()
    drawn = (uniform * num_left).long()
    for column in torch.stack(skipped, -1).sort(-1).values.unbind(-1):
        drawn = drawn + (drawn >= column)
    return drawn
