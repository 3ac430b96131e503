"""No part of the package: bounds over orders, the mean field, ReFusion's trajectories, and a linear objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.contrib.rl import GroupPolicy, LeftToRight, Likelihood, Trajectory
from refusion_lit.contrib.rl.likelihood import Answers, LaidOut, lay_out
from refusion_lit.decoding import BlockDiffusion, Decoder, FastDLLM, LLaDA, ReFusion, SelfSpeculative
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, LossOutput, ResponseBatch
from refusion_lit.learning.objective import Head, required_mask_id
from refusion_lit.learning.text_order import extend_responses, random_subset
from refusion_lit.noise import KeyedNoise
from refusion_lit.refusion.objective import next_in_slot
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require, require_at_least

_COLUMNS = ("token", "position", "seen", "own_start", "label", "is_mask")


@dataclass(frozen=True, kw_only=True)
class MaskedBound(Likelihood):
    """Bound of a masked model's likelihood over all orders of tokens, from coupled random masks (ESPO).

    For each of ``num_samples`` counts c, uniform on 0..n, exactly c of the n tokens are masked in one view and the
    others in a second one. The log-probabilities of masked tokens, times (n + 1) / c, are an unbiased estimate of the
    any-order bound: the sum over c of 1 / c times the expected sum at c masks (arXiv 2512.03759).

    Attributes:
        num_samples: Counts drawn per answer and update, at least 1, evenly spaced from a random start.
    """

    traits = ModelTraits(attention="bidirectional", predictions=("mask",))
    decoders = (LLaDA, FastDLLM)
    num_samples: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("objective.likelihood.num_samples", self.num_samples, 1)

    @property
    def num_forwards(self) -> int:
        """Two per sample."""
        return 2 * self.num_samples

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:
        """Lay out a view for each set of masks; see :meth:`Likelihood.layout`."""
        positions, in_response = batch.positions, batch.in_response
        is_masked, weights = self.drawn(noise, in_response)
        ids = batch.input_ids.repeat(self.num_forwards, 1)
        ends = batch.ends.repeat(self.num_forwards)
        return lay_out(
            ids.where(is_masked, IGNORE_INDEX),
            weights=is_masked * weights[:, None].float(),
            input_ids=ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=positions.expand_as(ids),
            visible=batch.bidirectional.repeat(self.num_forwards, 1, 1, 1),
            is_masked=is_masked,
            is_real=positions < ends[:, None],
            num_views=self.num_forwards,
        )

    def drawn(
        self, noise: KeyedNoise, candidates: Bool[Tensor, "batch part"]
    ) -> tuple[Bool[Tensor, "row part"], Float[Tensor, " row"]]:
        """Draw which parts (tokens or slots) are masked in each view, view-major, and the weight of each view's sum."""
        number = candidates.sum(1)
        strata = torch.arange(self.num_samples, device=number.device, dtype=torch.float64)[:, None] / self.num_samples
        counts = ((noise.uniform("count", 1)[:, 0] + strata) % 1 * (number + 1)).long()
        orders = torch.stack([noise.bits(f"order {i}", candidates.shape[1]) for i in range(self.num_samples)])
        masks = random_subset(orders, candidates.expand(self.num_samples, -1, -1), counts)
        masks = torch.cat((masks, candidates & ~masks))
        counts = torch.cat((counts, number - counts))
        weights = ((number + 1).double() / counts.clamp(min=1) / len(counts)).where(counts > 0, 0.0)
        return masks.flatten(0, 1), weights.flatten()


@dataclass(frozen=True, kw_only=True)
class BlockBound(Likelihood):
    """Bound of a block model's likelihood over the orders of tokens inside each block (EBPO, LLaDA2.1's report).

    One forward per noise level over ``[noisy; clean]`` shows each block the blocks before it without masks. In a block
    with n tokens of the answer, c of them are masked, c uniform on 1..n: their log-probabilities, times n / c, are an
    unbiased estimate of the block's any-order bound, and the sum over blocks is one bound of the whole answer. Levels
    are evenly spaced from a random start in each block, with equal weights. Blocks are counted from position 0, prompt
    included. What lies after the answer in its last block stays masked, as if it were decoded last.

    Attributes:
        num_samples: Noise levels per answer and update, at least 1.
        block_size: Tokens per block, as in the decoder.
    """

    decoders = (BlockDiffusion,)
    num_samples: int = 2
    block_size: int = 32

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("objective.likelihood.num_samples", self.num_samples, 1)
        require_at_least("objective.likelihood.block_size", self.block_size, 1)

    @property
    def traits(self) -> ModelTraits:  # pyright: ignore[reportIncompatibleVariableOverride] - depends on an option
        """Block-causal attention; masks predict themselves."""
        return ModelTraits(attention="block_causal", block_size=self.block_size, predictions=("mask",))

    def refusal(self, decoder: Decoder) -> str | None:
        """Refuse other decoders, other block sizes, and masks that are read at the place before."""
        if type(decoder) is BlockDiffusion and decoder.block_size != self.block_size:
            return f"BlockDiffusion has block_size {decoder.block_size}, BlockBound {self.block_size}"
        if type(decoder) is BlockDiffusion and decoder.shifted:
            return "BlockBound reads each mask at its own place, BlockDiffusion with shifted at the one before"
        return super().refusal(decoder)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:
        """Lay out a view for each noise level; see :meth:`Likelihood.layout`."""
        mask, size, num_views = required_mask_id(self, special_tokens), self.block_size, self.num_samples
        ends = batch.ends
        lengths = (ends + size - 1) // size * size
        filled = extend_responses(batch, lengths - batch.prompt_lengths, special_tokens, token_id=mask)
        num_tokens = filled.input_ids.shape[1]
        positions = torch.arange(num_tokens, device=ends.device)
        in_response = (positions >= batch.prompt_lengths[:, None]) & (positions < ends[:, None])
        candidates = in_response.unflatten(1, (-1, size)).expand(num_views, -1, -1, -1)
        number = candidates.sum(-1)
        strata = torch.arange(num_views, device=ends.device, dtype=torch.float64)[:, None, None] / num_views
        counts = 1 + ((noise.uniform("level", number.shape[-1]) + strata) % 1 * number).long()
        orders = torch.stack([noise.bits(f"order {i}", num_tokens) for i in range(num_views)])
        is_masked = random_subset(orders.unflatten(2, (-1, size)), candidates, counts).flatten(2).flatten(0, 1)
        weights = (number.double() / counts / num_views).repeat_interleave(size, 2).flatten(0, 1)
        clean = filled.input_ids.repeat(num_views, 1)
        is_noisy = F.pad(is_masked, (0, num_tokens))
        labels = torch.cat((clean, clean), 1).where(is_noisy, IGNORE_INDEX)
        return lay_out(
            labels,
            weights=is_noisy * F.pad(weights.float(), (0, num_tokens)),
            input_ids=torch.cat((clean.masked_fill(is_masked, mask), clean), 1),
            position_ids=positions.repeat(2).expand_as(labels),
            visible=three_part_ranges(num_tokens, size, lengths.repeat(num_views)),
            is_masked=is_noisy,
            is_real=(positions < lengths[:, None]).repeat(num_views, 2),
            num_views=num_views,
        )


@dataclass(frozen=True, kw_only=True)
class SlotBound(MaskedBound):
    """Coupled bound over all orders of slots: ESPO for hybrid models.

    A masked slot is predicted as by ``LeftToRight``, but from the prompt and the visible slots in random order.

    Attributes:
        slot_size: Tokens per slot, as in the decoder.
    """

    traits = LeftToRight.traits
    decoders = (SelfSpeculative,)
    slot_size: int = 8

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        require_at_least("objective.likelihood.slot_size", self.slot_size, 1)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:
        """Lay out a view for each set of masked slots; see :meth:`Likelihood.layout`."""
        num_slots = -(-batch.input_ids.shape[1] // self.slot_size)
        starts = torch.arange(num_slots, device=batch.input_ids.device) * self.slot_size
        is_masked, weights = self.drawn(noise, starts < batch.response_lengths[:, None])
        order = noise.bits("slot_order", num_slots).repeat(self.num_forwards, 1)
        mask = required_mask_id(self, special_tokens)
        return slots_apart(batch, special_tokens, mask, self.slot_size, is_masked, weights, order)


@dataclass(frozen=True, kw_only=True)
class MeanField(LeftToRight):
    """Every slot is predicted from the prompt alone, as if all were drawn at once (d1, arXiv 2504.12216, for slots).

    It is neither the policy nor a bound of it.
    """

    is_exact = False

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:  # noqa: ARG002
        """Mask all slots; see :meth:`Likelihood.layout`."""
        num_slots = -(-batch.input_ids.shape[1] // self.slot_size)
        order = torch.arange(num_slots, device=batch.input_ids.device).expand(len(batch.input_ids), -1)
        is_masked = order * self.slot_size < batch.response_lengths[:, None]
        weights = torch.ones_like(batch.response_lengths, dtype=torch.float64)
        mask = required_mask_id(self, special_tokens)
        return slots_apart(batch, special_tokens, mask, self.slot_size, is_masked, weights, order)


def slots_apart(
    batch: ResponseBatch,
    special_tokens: SpecialTokens,
    mask: int,
    size: int,
    is_masked: Bool[Tensor, "row slot"],
    weights: Float[Tensor, " row"],
    order: Int[Tensor, "row slot"],
) -> LaidOut:
    """Lay out prompts, visible slots by ``order``, masked slots, and the mask of each masked slot's first place.

    A masked slot sees the prompt, the visible slots and itself.

    Args:
        batch: Prompts and answers.
        special_tokens: Ids of the tokenizer's special tokens.
        mask: Id of the mask token.
        size: Tokens per slot.
        is_masked: Masked slots of each row; rows are views of the batch, view-major.
        weights: Weight of each row's labels.
        order: Numbers by which visible slots are sorted.
    """
    num_views = len(is_masked) // len(batch.input_ids)
    batch = ResponseBatch(
        input_ids=batch.input_ids.repeat(num_views, 1),
        prompt_lengths=batch.prompt_lengths.repeat(num_views),
        response_lengths=batch.response_lengths.repeat(num_views),
        sample_keys=batch.sample_keys.repeat(num_views),
    )
    num_rows, num_tokens = batch.input_ids.shape
    num_slots = is_masked.shape[1]
    positions, in_response = batch.positions, batch.in_response
    places = (positions - batch.prompt_lengths[:, None]).clamp(min=0)
    rest = next_in_slot(batch, torch.full_like(batch.prompt_lengths, size))
    ranks = torch.where(is_masked, 2**53, order).argsort(dim=1, stable=True).argsort(dim=1)
    is_real = batch.is_real
    group = torch.where(in_response, 1 + ranks.gather(1, places // size), (~is_real).long() * (num_slots + 1))
    at = (group * num_tokens + positions).argsort(1)

    places = places.gather(1, at)
    starts = torch.arange(num_slots, device=at.device) * size
    firsts = batch.prompt_lengths[:, None] + starts
    lengths = (batch.response_lengths[:, None] - starts).clamp(0, size)
    context = (batch.prompt_lengths + (lengths * ~is_masked).sum(1))[:, None]
    is_apart = torch.cat((is_masked.gather(1, places // size) & in_response.gather(1, at), is_masked), 1)
    index = torch.arange(num_tokens + num_slots, device=at.device).expand(num_rows, -1)
    own_start = index - F.pad(places % size, (0, num_slots))
    own_start = own_start.where(is_apart | (index >= num_tokens), 0)
    seen = context.where(is_apart, 0)
    first_tokens = batch.input_ids.gather(1, firsts.clamp(max=num_tokens - 1))
    labels = torch.cat((rest.gather(1, at), first_tokens), 1).where(is_apart, IGNORE_INDEX)
    masks = torch.full_like(firsts, mask).where(is_masked, special_tokens.pad_token_id)
    before = torch.stack((torch.zeros_like(seen), seen), -1)
    return lay_out(
        labels,
        weights=(labels != IGNORE_INDEX) * weights[:, None].float(),
        input_ids=torch.cat((batch.input_ids.gather(1, at), masks), 1),
        position_ids=torch.cat((at, firsts.where(is_masked, num_tokens)), 1),
        visible=torch.stack((before, torch.stack((own_start, index + 1), -1)), 2),
        is_masked=F.pad(is_masked, (num_tokens, 0)),
        is_real=torch.cat((is_real, is_masked), 1),
        num_views=num_views,
    )


@dataclass(frozen=True, kw_only=True)
class Rounds(LeftToRight):
    """Exact for decodes by ``ReFusion`` with infill by masks, one forward: the trajectory policy.

    What that decoder samples is its plans' drafts, discarded ones included, since they steer which slots are chosen and
    accepted. Verification and infill are deterministic, given the drafts. So the log-probability of a decode is the sum
    over its plans and their drafts. (Different decodes may write the same text: it is that of the decode, not of the
    text.) The forward feeds prompt and answer in decoding order, as the cache held them, then the masks of each plan,
    which see what the cache held at that time.

    Length of the forward: P + L + M positions, for P prompt tokens, L tokens that became final (those after an EOS
    included), and M masks of all plans that were verified. A plan has at most the masks of one serial block, so M is at
    most the number of these plans times the tokens of a serial block.

    Texts without a trajectory, as in validation, get the likelihood of :class:`LeftToRight`.
    """

    decoders = (ReFusion,)

    def refusal(self, decoder: Decoder) -> str | None:
        """Refuse other decoders, and infill with bonus tokens, whose plans the record does not tell apart."""
        if isinstance(decoder, ReFusion) and decoder.infill == "bonus":
            return "ReFusion with infill: bonus has no recorded plans; set infill to mask"
        return super().refusal(decoder)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> LaidOut:
        """Append the masks of each plan to the decoded text; see :meth:`Likelihood.layout`."""
        if not (isinstance(batch, Answers) and batch.trajectories):
            return replace(super().layout(batch, noise, special_tokens), places=None)
        mask = required_mask_id(self, special_tokens)
        rows = [np.array(list(_entries(trajectory, self.slot_size, mask))) for trajectory in batch.trajectories]
        width = max(map(len, rows))
        table = np.zeros((len(rows), width, len(_COLUMNS)), dtype=np.int64)
        table[:] = (special_tokens.pad_token_id, width, 0, 0, IGNORE_INDEX, False)
        table[..., _COLUMNS.index("own_start")] = np.arange(width)
        for number, row in enumerate(rows):
            table[number, : len(row)] = row
        device = batch.input_ids.device
        columns = torch.from_numpy(table).to(device)
        ids, positions, seen, own_start, labels, is_mask = columns.unbind(-1)
        index = torch.arange(width, device=device).expand_as(ids)
        before = torch.stack((torch.zeros_like(seen), seen), -1)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        return lay_out(
            labels,
            input_ids=ids,
            position_ids=positions,
            visible=torch.stack((before, torch.stack((own_start, index + 1), -1)), 2),
            is_masked=is_mask.bool(),
            is_real=index < lengths[:, None],
        )


@dataclass(frozen=True, kw_only=True)
class LinearPolicy(GroupPolicy):
    """Raises rewards by a lower bound that is a sum over the samples of a likelihood (BGPO, arXiv 2510.11683).

    Let d_s be the log-ratio of an answer per token, estimated from sample s of the likelihood alone. Without clipping,
    :class:`GroupPolicy` raises A exp(mean d_s). This class raises A (1 + mean d_s) where A >= 0 (tangent of exp), and
    A mean exp(d_s) where A < 0 (Jensen's inequality). Neither is above it, and in the first update on new answers, with
    d_s = 0, the gradients are equal. As the loss is a sum over samples, the views of one sample give its part of the
    gradient, with memory constant in their number. (Training still feeds all views of a micro-batch at once.)

    ``clip_low`` and ``clip_high`` have no effect. ``kl_weight`` must be 0, as ``kl`` is not a sum over samples.
    """

    unit: Literal["token", "sequence"] = "sequence"

    def __post_init__(self) -> None:
        """Refuse options that the bound does not have."""
        super().__post_init__()
        require(self.unit == "sequence", "objective.unit", "sequence with LinearPolicy", self.unit, "leave it out")
        require(self.kl_weight == 0, "objective.kl_weight", "0 with LinearPolicy", self.kl_weight, "leave it out")

    def loss(self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: LaidOut) -> LossOutput:
        """Compute the loss of the samples whose views are in the batch; see :meth:`Objective.loss`."""
        lengths, advantages = corrupted.lengths, corrupted.advantages
        if lengths is None or advantages is None:
            return super().loss(hidden, head, corrupted)
        with torch.no_grad():
            output = super().loss(hidden, head, corrupted)
        values = self.log_probabilities(hidden, head, corrupted)[0]
        old = values.detach() if corrupted.old is None else corrupted.old.to(values.dtype)
        weighted = corrupted.weights.to(values.dtype) * (values - old)
        num_samples = getattr(self.likelihood, "num_samples", 1)
        # Coupled masks: all first views, then all second ones.
        num_per_sample = getattr(self.likelihood, "num_forwards", num_samples) // num_samples
        parts = rearrange(
            weighted, "(view sample row) token -> row sample (view token)", view=num_per_sample, row=len(lengths)
        )
        log_ratio = num_samples * parts.sum(-1) / lengths[:, None]
        advantages = advantages.to(values.dtype)[:, None]
        gains = advantages * torch.where(advantages < 0, log_ratio.exp(), 1 + log_ratio)
        sums = dict(zip(self.terms, output.sums, strict=True))
        sums |= dict.fromkeys(("clipped_low", "clipped_high"), gains.new_zeros(()))
        sums["policy"] = -gains.sum() / num_samples
        return replace(output, sums=torch.stack(list(sums.values())))


def _entries(trajectory: Trajectory, slot_size: int, mask: int) -> Iterator[tuple[int, ...]]:
    """Yield the values of ``_COLUMNS`` for each token of an answer's sequence.

    The token at an index sees the first ``seen`` tokens, and those from ``own_start`` up to itself.
    """
    num_prompt = len(trajectory.prompt_ids)
    for position, token in enumerate(trajectory.prompt_ids.tolist()):
        yield token, position, 0, 0, IGNORE_INDEX, False
    order: Any = trajectory.order
    places: list[int] = np.argsort(order)[np.count_nonzero(order < 0) :].tolist()
    rounds = trajectory.rounds[places]
    group = num_prompt  # where the tokens that became final in one forward begin
    own_start = num_prompt
    for index, (place, number) in enumerate(zip(places, rounds.tolist(), strict=True), num_prompt):
        is_new = index == num_prompt or number != rounds[index - num_prompt - 1]
        group = index if is_new else group
        own_start = index if is_new or place % slot_size == 0 else own_start
        # Slots that are filled in parallel do not see one another; those verified together do.
        is_joint = str(trajectory.phases[number - 1]).startswith("verify")
        start = group if is_joint else own_start
        yield int(trajectory.tokens[place]), num_prompt + place, group, start, IGNORE_INDEX, False
    index = num_prompt + len(places)
    for number in _followed_plans(trajectory):
        drafts: Int[np.ndarray, "draw 3"] = trajectory.draws[trajectory.draws[:, 0] == number]
        labels = dict(drafts[:, 1:].tolist())
        own_start = index
        for first in sorted(place for place in labels if place % slot_size == 0):
            for place in range(first, first + slot_size):
                label = labels.get(place, IGNORE_INDEX)
                yield mask, num_prompt + place, num_prompt + int((rounds <= number).sum()), own_start, label, True
                index += 1


def _followed_plans(trajectory: Trajectory) -> Iterator[int]:
    """Yield the numbers of the plans that were verified.

    A plan that was made beside a verification is dropped unless all of that was accepted; then another one follows.
    """
    for number, (phase, following) in enumerate(zip(trajectory.phases, trajectory.phases[1:], strict=False), 1):
        if phase.endswith("plan") and following.startswith("verify"):
            yield number
