"""Draws with options: temperature, filters, guidance, templates, constraints, statistics and rejection sampling.

The greedy fast path of :mod:`~refusion_lit.engine.reading` needs none of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.engine.requests import Branch, Draw, Proposal, Read, Statistic
from refusion_lit.modeling.devices import first_argmax, to_device
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.types import SamplingParams, SpecialTokens
from refusion_lit.utils.require import require_choice


@dataclass(slots=True)
class Drawn:
    """Results of a group of reads on the device, chunk by chunk.

    Attributes:
        tokens: The drafts.
        values: The probability of each draft and of each given token; empty if no probabilities are wanted.
        statistics: The requested statistic of each draft.
        distributions: Distribution of each draft, if the draw proposes.
    """

    tokens: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)


def general_key(read: Read) -> tuple[object, ...]:
    """Return the key of a read that is not on the fast path: reads with equal keys draw in the same way."""
    draw = read.draw
    sampling = draw.sampling
    return (draw.forbidden, read.guide, bool(read.branch.proposals), sampling.temperature, sampling.top_p,
            sampling.top_k, draw.guidance, draw.confidence_forbidden, draw.statistic, draw.top_p_first,
            draw.confidence_dtype, draw.proposes)  # fmt: skip


class General:
    """Draws the drafts of a group of reads that draw in the same way.

    Args:
        reads: The group.
        special: The model's special ids.
        banned: Ids below the vocabulary's size that are not drawn, on the device of the logits.
    """

    def __init__(self, reads: Sequence[Read], special: SpecialTokens, banned: Int[Tensor, " id"]) -> None:
        draw = reads[0].draw
        keys = [key for read in reads for key in noise_keys(read.branch, read.draw, read.prompt.id)]
        proposals = [read.branch.proposals.get(offset) for read in reads for offset in read.branch.draft_at]
        self._draw = draw
        self._vocab_size = special.vocab_size
        self._banned = banned
        self._ends = to_device(sorted(special.eos_token_ids), banned.device)
        self._keys = to_device(keys, banned.device)
        self._proposals = proposals if draw.proposes or reads[0].branch.proposals else None
        self._masks = [mask for read in reads for mask in _allowed(read)]
        self._in_span = [inside for read in reads for inside in _in_span(read)]

    def draw(self, logits: Float[Tensor, "draft vocab"], first: int, drawn: Drawn) -> Int[Tensor, " draft"]:
        """Draw a token from each row; append statistics and distributions.

        Args:
            logits: Logits of some of the group's drafts, not changed.
            first: Number of the first one among all drafts of the group.
            drawn: Receives statistics and distributions.
        """
        draw = self._draw
        stop = first + len(logits)
        in_span = [row for row, inside in enumerate(self._in_span[first:stop]) if inside]
        allowed = logits.index_fill(-1, self._banned, -math.inf)
        allowed[:, self._vocab_size :] = -math.inf
        self._end_no_span(allowed, in_span)
        for row, mask in enumerate(self._masks[first:stop]):
            if mask is not None:
                allowed[row, : self._vocab_size].masked_fill_(~mask.to(logits.device), -math.inf)
        keys = self._keys[first:stop]
        if self._proposals is None:
            tokens = draw_tokens(allowed, draw.sampling, keys, top_p_first=draw.top_p_first)
        else:
            tokens = _propose_or_verify(allowed, draw, keys, self._proposals[first:stop], drawn)
        if draw.statistic is not None:
            seen = logits.index_fill(-1, to_device(draw.forbidden, logits.device), -math.inf)
            self._end_no_span(seen, in_span)
            filtered = filter_logits(seen, draw.sampling, top_p_first=draw.top_p_first)
            statistic = draft_statistic(draw.statistic, seen, filtered, tokens, draw.confidence_dtype)
            drawn.statistics.append(statistic.double())  # ids are transferred beside it
        return tokens

    def probabilities(self, logits: Float[Tensor, "position vocab"]) -> Float[Tensor, "position vocab"]:
        """Return the probabilities of all ids; changes ``logits``."""
        if self._draw.confidence_forbidden:
            logits.index_fill_(-1, to_device(self._draw.confidence_forbidden, logits.device), -math.inf)
        return lowered(logits, self._draw.confidence_dtype).softmax(-1).to(logits.dtype)

    def _end_no_span(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Forbid EOS tokens in rows that fill a template's span."""
        if rows:
            logits[to_device(rows, logits.device)[:, None], self._ends] = -math.inf


def fill_general(group: Sequence[Read], drawn: Drawn, numbers: Iterator[float]) -> None:
    """Fill what only general draws have: statistics, proposals, and the tokens that a constraint takes instead."""
    distributions = iter(drawn.distributions)
    for read in group:
        reading = read.reading
        if drawn.statistics:
            reading.statistic = [*islice(numbers, len(reading.tokens))]
        reading.proposals = [*map(Proposal, reading.tokens, distributions)]
        if read.constraint is not None:
            pairs = zip(_contexts(read), reading.tokens, strict=True)
            reading.tokens = [read.constraint.settle(*context, token) for context, token in pairs]


def _allowed(read: Read) -> list[Tensor | None]:
    """Return which ids each draft may be, bool [vocab]; ``None`` where all may."""
    if read.constraint is None:
        return [None] * len(read.branch.draft_at)
    return [read.constraint.allowed(*context) for context in _contexts(read)]


def _contexts(read: Read) -> Iterator[tuple[int, list[int]]]:
    """Yield the place of each draft, and the response before it, as a decoder from left to right feeds it."""
    branch = read.branch
    first = branch.positions[0] - len(read.prompt.token_ids)
    for offset in branch.draft_at:
        before = [*read.canvas[: max(first, 0)], *branch.tokens[max(-first, 0) : offset + 1]]
        yield branch.positions[offset] + branch.shift - len(read.prompt.token_ids), before


def _in_span(read: Read) -> list[bool]:
    """Return which drafts fill a template's span: those before its last given token."""
    branch = read.branch
    prompt = read.prompt
    end = len(prompt.token_ids) + prompt.given_length if prompt.num_to_fill else 0
    return [branch.positions[offset] + branch.shift < end for offset in branch.draft_at]


def _propose_or_verify(
    logits: Float[Tensor, "draft vocab"], draw: Draw, keys: Int[Tensor, " draft"],
    proposals: Sequence[Proposal | None], drawn: Drawn,
) -> Int[Tensor, " draft"]:  # fmt: skip
    """Draw by rejection sampling: keep proposals or replace them; where there is none, draw from the distribution."""
    probabilities = filter_logits(logits, draw.sampling, top_p_first=draw.top_p_first).softmax(-1)
    if draw.proposes:
        assert draw.sampling.temperature > 0, "a greedy draft has no distribution"
        drawn.distributions += probabilities.unbind()
    tokens = to_device([0 if proposal is None else proposal.token for proposal in proposals], logits.device)
    nothing = logits.new_zeros(logits.shape[-1])
    proposed = [nothing if proposal is None else proposal.probabilities for proposal in proposals]
    return keep_or_draw(probabilities, keys, tokens, torch.stack(proposed))


def filter_logits(
    logits: Float[Tensor, "position vocab"], sampling: SamplingParams, *, top_p_first: bool = False
) -> Float[Tensor, "position vocab"]:
    """Apply temperature, then top-k, then top-p.

    Top-k keeps all tokens that tie with the last one it keeps. Top-p keeps the most probable tokens up to and
    including the one that crosses ``top_p``; at least one token is kept.

    Args:
        logits: Finite, or -inf for banned ids; at least one is finite.
        sampling: Sampling options; temperature 0 filters as 1 does, for confidences.
        top_p_first: Apply top-p before top-k.
    """
    if sampling.temperature > 0:
        # Subtract the maximum, which keeps the result finite at any temperature.
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if top_p_first:
        return _top_k(_top_p(logits, sampling.top_p), sampling.top_k)
    return _top_p(_top_k(logits, sampling.top_k), sampling.top_p)


def _top_k(logits: Tensor, top_k: int | None) -> Tensor:
    if top_k is None or top_k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    if top_p >= 1:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    is_after = before >= top_p
    is_after[..., 0] = False  # a top_p below the smallest float32 rounds to 0, which would drop every id
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, is_after)
    return logits.masked_fill(dropped, -math.inf)


def noise_keys(branch: Branch, draw: Draw, prompt_id: str) -> list[int]:
    """Return the key of each draw's noise: a function of seed, prompt, round and predicted position alone.

    Args:
        branch: The branch that is read.
        draw: How they are drawn; greedy draws have no noise and get no keys.
        prompt_id: Id of the prompt.
    """
    if draw.sampling.temperature == 0:
        return []
    parts = ("proposal" if draw.proposes else "draw", draw.sampling.seed, prompt_id, draw.round)
    return [stable_key(*parts, branch.positions[offset] + branch.shift) for offset in branch.draft_at]


def draw_tokens(
    logits: Float[Tensor, "position vocab"],
    sampling: SamplingParams,
    noise_keys: Int[Tensor, " key"],
    *,
    top_p_first: bool = False,
) -> Int[Tensor, " position"]:
    """Draw one token at every position.

    At temperature 0 the most probable token is taken; ties go to the lower id. Above, Gumbel noise in float64 is added
    to the filtered logits, which draws from their softmax (lower precision would lower the effective temperature).

    Args:
        logits: Logits with banned ids at -inf.
        sampling: Sampling options.
        noise_keys: Key of each position's noise; empty at temperature 0.
        top_p_first: Apply top-p before top-k.
    """
    if sampling.temperature == 0:
        return first_argmax(logits)
    return _with_gumbel_noise(filter_logits(logits, sampling, top_p_first=top_p_first), noise_keys)


def _with_gumbel_noise(
    logits: Float[Tensor, "position vocab"], noise_keys: Int[Tensor, " position"]
) -> Int[Tensor, " position"]:
    """Draw from the softmax of logits."""
    bits = KeyedNoise(noise_keys).bits("gumbel", logits.shape[-1])
    # The largest value would round to 1, whose noise is infinite, and -inf + inf is NaN.
    uniform = ((bits.double() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-53)
    return (logits.double() - (-uniform.log()).log()).argmax(-1)


def keep_or_draw(
    probabilities: Float[Tensor, "position vocab"],
    noise_keys: Int[Tensor, " position"],
    drafts: Int[Tensor, " position"],
    proposed: Float[Tensor, "position vocab"],
) -> Int[Tensor, " position"]:
    """Draw one token at every position by rejection sampling (Leviathan et al., arXiv 2211.17192, appendix A.1).

    A draft d, drawn from q, is kept with probability min(1, p(d) / q(d)). Otherwise the token is drawn from
    max(p - q, 0), normalised. The token's distribution is p.

    Args:
        probabilities: The distributions p, after temperature and filters.
        noise_keys: Key of each position's noise, another one than that of the draft.
        drafts: A draft for each position; any id where there is none.
        proposed: The distributions q of the drafts; zeros where there is none.
    """
    residual = (probabilities - proposed).clamp_(min=0)
    # Where p and q are equal but for rounding, nothing may be left to draw from.
    residual = residual.where(residual.sum(-1, keepdim=True) > 0, probabilities)
    drawn = _with_gumbel_noise(residual.log(), noise_keys)
    noise = KeyedNoise(noise_keys).uniform("keep", 1)
    p, q = (distribution.gather(-1, drafts[:, None]) for distribution in (probabilities, proposed))
    is_kept = (noise * q < p) & (q > 0)
    return drafts.where(is_kept[:, 0], drawn)


def draft_statistic(
    name: str,
    logits: Float[Tensor, "position vocab"],
    filtered: Float[Tensor, "position vocab"],
    tokens: Int[Tensor, " position"],
    dtype: str | None = None,
) -> Float[Tensor, " position"]:
    """Compute a figure of the drafts' distributions; for its name see :class:`~refusion_lit.decoding.Draw`.

    Args:
        name: One of ``Statistic``.
        logits: The logits before temperature and filters.
        filtered: The filtered logits.
        tokens: The drawn tokens.
        dtype: Type to compute it in; float64 by default.

    Raises:
        ValueError: If no figure has this name.
    """
    require_choice("statistic", name, get_args(Statistic))
    probability = lowered(filtered, dtype or "float64").softmax(-1)
    if name == "margin":
        top = probability.topk(2).values
        return top[:, 0] - top[:, 1]
    if name == "negative_entropy":
        return (probability * (probability + 1e-10).log()).sum(-1)
    if name == "filtered":
        return probability.gather(-1, tokens[:, None])[:, 0]
    return torch.special.entr(lowered(logits, dtype or "float64").softmax(-1)).sum(-1)


def lowered(logits: Float[Tensor, "*shape vocab"], dtype: str | None) -> Float[Tensor, "*shape vocab"]:
    """Convert logits to another type; finite values beyond its range are clamped, banned ids stay at -inf."""
    if dtype is None:
        return logits
    target = getattr(torch, dtype)
    limits = torch.finfo(target)
    if limits.max < torch.finfo(logits.dtype).max:
        logits = logits.clamp(limits.min, limits.max).where(logits > -math.inf, logits)
    return logits.to(target)
