"""Bounds of likelihoods for policy optimisation, by sampling masks: masked models, block models, slots in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.families.block_diffusion.decoder import BlockDiffusion
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.llada.objective import all_of
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import random_subset, response_positions
from refusion_lit.learning.text_order import extend_to_multiple
from refusion_lit.noise import KeyedNoise
from refusion_lit.policy.likelihood import Likelihood, laid_out, mask_id, repeated, stratified
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.objective import corrupt_slots, next_in_slot
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least, require_choice


@dataclass(frozen=True, kw_only=True)
class Sampled(Likelihood):
    """A bound estimated from random masks; each sample is a view, coupled ones have a complementary view.

    With n maskable parts (tokens or slots), a count c is uniform on 0..n, exactly c parts are masked, and the sum of
    their log-probabilities is multiplied by (n + 1) / c. That is an unbiased estimate of the any-order bound: the sum
    over c of 1 / c times the expected sum at c masks. Counts are stratified over the samples.

    Attributes:
        num_samples: Counts drawn per answer and update, at least 1.
        coupled: Also mask exactly the other parts, weighted by (n + 1) / (n - c), and average: less variance.
    """

    num_samples: int = 2
    coupled: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("objective.likelihood.num_samples", self.num_samples, 1)
        require_choice("objective.likelihood.coupled", self.coupled, (True, False))

    @property
    def num_forwards(self) -> int:
        """One per view."""
        return self.num_samples * (2 if self.coupled else 1)

    def drawn(
        self, noise: KeyedNoise, candidates: Bool[Tensor, "batch part"]
    ) -> tuple[Bool[Tensor, "rows part"], Float[Tensor, " rows"]]:
        """Draw which parts are masked in each view, view-major, and the weight of each view's sum."""
        number = candidates.sum(1)
        counts = (stratified(noise, "count", self.num_samples) * (number + 1)).long()
        orders = torch.stack([noise.bits(f"order {i}", candidates.shape[1]) for i in range(self.num_samples)])
        masks = random_subset(orders, candidates.expand(self.num_samples, -1, -1), counts)
        if self.coupled:
            masks = torch.cat((masks, candidates & ~masks))
            counts = torch.cat((counts, number - counts))
        weights = ((number + 1).double() / counts.clamp(min=1) / len(counts)).where(counts > 0, 0.0)
        return masks.flatten(0, 1), weights.flatten()


@dataclass(frozen=True, kw_only=True)
class MaskedBound(Sampled):
    """Bound of masked models' any-order likelihood: the coupled ELBO of ESPO (arXiv 2512.03759), two forwards a sample.

    BGPO (arXiv 2510.11683) is the same bound with ``objective.unit: view`` and ``objective.surrogate: linear``.

    Attributes:
        pad_responses_to: Lengthen answers with EOS tokens to a multiple of this, as in training
            (:class:`~refusion_lit.objectives.Masked`). ``None``: do not.
    """

    decoders = (LLaDA, FastDLLM)
    pad_responses_to: int | None = None

    @property
    def traits(self) -> ModelTraits:
        """Bidirectional attention; masks predict themselves."""
        return ModelTraits(attention="bidirectional", predictions=("mask",))

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Mask random tokens in each view; see :meth:`Likelihood.layout`."""
        if self.pad_responses_to is not None:
            batch = extend_to_multiple(batch, self.pad_responses_to, special_tokens)
        is_masked, weights = self.drawn(noise, response_positions(batch)[1])
        batch = repeated(batch, self.num_forwards)
        positions, _ = response_positions(batch)
        ends = batch.prompt_lengths + batch.response_lengths
        return laid_out(
            batch.input_ids.where(is_masked, IGNORE_INDEX),
            weights=is_masked * weights[:, None].float(),
            input_ids=batch.input_ids.masked_fill(is_masked, mask_id(self, special_tokens)),
            position_ids=positions.expand_as(batch.input_ids),
            visible=all_of(ends, len(positions)),
            is_masked=is_masked,
            is_real=positions < ends[:, None],
            places=(positions - batch.prompt_lengths[:, None]).where(is_masked, -1),
            num_views=self.num_forwards,
        )


@dataclass(frozen=True, kw_only=True)
class SlotBound(Sampled):
    """Bound of hybrid models' likelihood over slots in any order, two forwards per sample; for comparison.

    Masked slots are predicted as by :class:`LeftToRight`, but from the visible slots in random order, and do not see
    one another. ``LeftToRight`` is exact at one forward.

    Attributes:
        slot_size: Tokens per slot; that of the decoder.
    """

    decoders = (SelfSpeculative, ReFusion)
    slot_size: int = 8

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        require_at_least("objective.likelihood.slot_size", self.slot_size, 1)

    @property
    def traits(self) -> ModelTraits:
        """The traits of the hybrid objective."""
        return ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Put visible slots first, then masked ones side by side, then their masks; see :meth:`Likelihood.layout`."""
        size = self.slot_size
        num_tokens = batch.input_ids.shape[1]
        slots = torch.arange(-(-num_tokens // size), device=batch.input_ids.device)
        is_masked, weights = self.drawn(noise, slots * size < batch.response_lengths[:, None])
        views = []
        for masked, weight in zip(is_masked.chunk(self.num_forwards), weights.chunk(self.num_forwards), strict=True):
            views.append(self._view(batch, noise, masked, weight, special_tokens))
        names = ("input_ids", "position_ids", "labels", "weights", "visible", "is_masked", "is_real", "places")
        joined = {name: torch.cat([view[name] for view in views]) for name in names}
        return laid_out(joined.pop("labels"), num_views=self.num_forwards, **joined)

    def _view(
        self, batch: ResponseBatch, noise: KeyedNoise, masked: Bool[Tensor, "batch slot"],
        weight: Float[Tensor, " batch"], special_tokens: SpecialTokens,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Lay out one view."""
        size = self.slot_size
        num_tokens = batch.input_ids.shape[1]
        mask = mask_id(self, special_tokens)
        sizes = torch.full_like(batch.prompt_lengths, size)
        ordered = corrupt_slots(batch, noise, masked, slot_sizes=sizes, mask_token_id=mask)
        order = ordered.position_ids
        places = order - batch.prompt_lengths[:, None]
        targets = next_in_slot(batch, response_positions(batch)[1], _places(batch), sizes).gather(1, order)
        targets = targets.where(ordered.is_masked, IGNORE_INDEX)
        assert ordered.is_real is not None
        context = (ordered.is_real & ~ordered.is_masked).sum(1, keepdim=True)

        index = torch.arange(num_tokens, device=order.device).expand_as(order)
        own_start = torch.where(ordered.is_masked, index - places % size, 0)
        seen = torch.stack((torch.zeros_like(index), context.where(ordered.is_masked, 0)), -1)
        ranges = torch.stack((seen, torch.stack((own_start, index + 1), -1)), 2)

        starts = torch.arange(masked.shape[1], device=order.device) * size
        firsts = batch.prompt_lengths[:, None] + starts
        exists = masked & (starts < batch.response_lengths[:, None])
        first_tokens = batch.input_ids.gather(1, firsts.clamp(max=num_tokens - 1)).where(exists, IGNORE_INDEX)
        at = (num_tokens + torch.arange(masked.shape[1], device=order.device)).expand_as(firsts)
        seen = torch.stack((torch.zeros_like(at), context.where(exists, 0)), -1)
        masks = torch.full_like(at, mask).where(exists, special_tokens.pad_token_id)
        labels = torch.cat((targets, first_tokens), 1)
        return {
            "input_ids": torch.cat((batch.input_ids.gather(1, order), masks), 1),
            "position_ids": torch.cat((order, firsts.where(exists, num_tokens)), 1),
            "labels": labels,
            "weights": (labels != IGNORE_INDEX) * weight[:, None].float(),
            "visible": torch.cat((ranges, torch.stack((seen, torch.stack((at, at + 1), -1)), 2)), 1),
            "is_masked": F.pad(exists, (num_tokens, 0)),
            "is_real": torch.cat((ordered.is_real, exists), 1),
            "places": torch.cat((places + 1, starts.expand_as(at)), 1).where(labels != IGNORE_INDEX, -1),
        }


def _places(batch: ResponseBatch) -> Int[Tensor, "batch token"]:
    """Return the place of each token in the response, 0 in the prompt."""
    positions, _ = response_positions(batch)
    return (positions - batch.prompt_lengths[:, None]).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class BlockBound(Likelihood):
    """Bound of block models' likelihood, one forward per noise level for all blocks at once: EBPO (LLaDA2.x).

    At each level every block has at least one mask: c of its n response tokens, c stratified on 1..n over the levels
    from a random start of each block, and the sum of their log-probabilities is multiplied by n / c. Levels are
    averaged. Blocks are counted from position 0, prompt included; the rest of the last block is filled with EOS tokens,
    which count as the answer's.

    Attributes:
        block_size: Tokens per block; that of the decoder and of training.
        num_levels: Noise levels per answer and update, at least 1.
    """

    decoders = (BlockDiffusion,)
    block_size: int = 8
    num_levels: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("objective.likelihood.block_size", self.block_size, 1)
        require_at_least("objective.likelihood.num_levels", self.num_levels, 1)

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; masks predict themselves."""
        return ModelTraits(attention="block_causal", block_size=self.block_size, predictions=("mask",))

    @property
    def num_forwards(self) -> int:
        """One per level, over the doubled sequence."""
        return self.num_levels

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Mask some tokens of every block in each view, and append the clean text; see :meth:`Likelihood.layout`."""
        size = self.block_size
        ends = -(-(batch.prompt_lengths + batch.response_lengths) // size) * size
        padded = F.pad(
            batch.input_ids, (0, int(ends.max()) - batch.input_ids.shape[1]), value=special_tokens.pad_token_id
        )
        positions = torch.arange(padded.shape[1], device=padded.device)
        filled = (positions >= (batch.prompt_lengths + batch.response_lengths)[:, None]) & (positions < ends[:, None])
        clean = padded.masked_fill(filled, special_tokens.eos_token_ids[0])
        in_response = (positions >= batch.prompt_lengths[:, None]) & (positions < ends[:, None])
        blocks = rearrange(in_response, "batch (block within) -> batch block within", within=size)
        number = blocks.sum(-1)
        start = noise.uniform("level", number.shape[1])
        counts = []
        masks = []
        for level in range(self.num_levels):
            count = 1 + (((start + level / self.num_levels) % 1) * number).long()
            bits = rearrange(noise.bits(f"order {level}", len(positions)), "batch (block within) -> batch block within",
                             within=size)  # fmt: skip
            counts.append(count)
            masks.append(random_subset(bits, blocks, count))
        is_masked = rearrange(masks, "level batch block within -> (level batch) (block within)")
        weights = repeat(torch.stack([number.double() / count for count in counts]) / self.num_levels,
                         "level batch block -> (level batch) (block within)", within=size)  # fmt: skip
        clean = clean.repeat(self.num_levels, 1)
        half = len(positions)
        places = (positions - batch.prompt_lengths[:, None]).repeat(self.num_levels, 1).where(is_masked, -1)
        return laid_out(
            F.pad(clean.where(is_masked, IGNORE_INDEX), (0, half), value=IGNORE_INDEX),
            weights=F.pad((weights * is_masked).float(), (0, half)),
            input_ids=torch.cat((clean.masked_fill(is_masked, mask_id(self, special_tokens)), clean), 1),
            position_ids=repeat(positions, "token -> row (half token)", row=len(clean), half=2),
            visible=three_part_ranges(half, size, ends.repeat(self.num_levels)),
            is_masked=F.pad(is_masked, (0, half)),
            is_real=repeat(positions < ends[:, None], "row token -> (level row) (half token)", level=self.num_levels,
                           half=2),
            places=F.pad(places, (0, half), value=-1),
            num_views=self.num_levels,
        )  # fmt: skip
