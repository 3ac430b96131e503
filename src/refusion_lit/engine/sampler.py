"""Samples tokens and scores given tokens, with one device-to-host transfer per call.

The steps are: gather hidden states, compute logits at the requested offsets only, sample, transfer, scatter. Jobs that
share sampling options form a group. :class:`GreedySampler` serves greedy groups without further options: most calls
have no others. :class:`GroupSampler` serves the remaining groups. The rest of the file contains functions of logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from typing import get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from refusion_lit.engine.requests import Branch, Draw, Proposal, SamplingJob, Statistic
from refusion_lit.modeling.devices import first_argmax, to_device
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.types import SamplingParams, SpecialTokens
from refusion_lit.utils.require import require_choice

_MAX_LOGITS = 1 << 26
"""Maximum number of logits in memory at once (256 MB in float32); more positions are processed in chunks."""

_MAX_SOFTMAX = 1 << 20
"""Logits per softmax on CPUs: small enough to stay in the processor's cache (benchmarks/fast_paths.py)."""


@dataclass(slots=True)
class GroupResults:
    """A group's results on the device, chunk by chunk.

    Attributes:
        tokens: The drafts.
        values: Drafts' and given tokens' probabilities; empty if no job needs probabilities.
        statistics: The drafts' requested statistic.
        distributions: The drafts' distributions, if the group proposes drafts.
        best: The most probable tokens, if the group denoises.
        signals: Soft embeddings, if the group denoises and the model conditions itself.
    """

    tokens: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)
    signals: list[Tensor] = field(default_factory=list)

    @property
    def numbers(self) -> list[Tensor]:
        """The results that readings get as plain numbers, in order."""
        return [*self.tokens, *self.values, *self.statistics, *self.best]


class Sampler:
    """Fills sampling jobs' readings from hidden states.

    Args:
        model: The model, whose head computes the logits.
        all_probabilities: Return all drafts' probabilities, requested or not (for traces).
    """

    def __init__(self, model: LanguageModel, *, all_probabilities: bool = False) -> None:
        self._head = model.head_runner()
        self._soft_embeddings = model.soft_embeddings
        self._special = model.special_tokens
        self._all_probabilities = all_probabilities
        ids = self._special.banned_token_ids
        # Sends the banned ids to a device once per set of forbidden ids.
        self._banned = cache(lambda forbidden, device: to_device(sorted({*ids, *forbidden}), device))

    def sample(self, hidden: Shaped[Tensor, "position hidden"], jobs: Sequence[SamplingJob]) -> None:
        """Fill the jobs' readings; only here does the host wait for the device."""
        groups: dict[object, list[SamplingJob]] = {}
        for job in jobs:
            if job.branch.draft_at or job.branch.score_at:
                groups.setdefault(_group_key(job), []).append(job)
        if not groups:
            return
        results = [self._sample_group(hidden, group) for group in groups.values()]
        parts = [part for result in results for part in result.numbers]
        if hidden.device.type != "cpu":  # one transfer, as their widest type: float32 holds ids below 2**24 exactly
            parts = [torch.cat(parts)]
        numbers = chain.from_iterable(part.tolist() for part in parts)
        for group, result in zip(groups.values(), results, strict=True):
            self._fill(group, result, numbers)

    def _sample_group(self, hidden: Shaped[Tensor, "position hidden"], group: Sequence[SamplingJob]) -> GroupResults:
        """Queue a group's work: drafts first, then given tokens, in chunks."""
        index = [job.start + offset for job in group for offset in job.branch.draft_at]
        num_drafts = len(index)
        index += [job.start + offset for job in group for offset, _ in job.branch.score_at]
        given = [token for job in group for _, token in job.branch.score_at]
        is_scored = self._all_probabilities or bool(given) or any(job.draw.with_probability for job in group)
        positions, scored = to_device([*index, *given], hidden.device).split_with_sizes((len(index), len(given)))
        banned = self._banned(group[0].draw.forbidden, hidden.device)
        if _is_greedy(group[0]):
            sampler = GreedySampler(self._special, banned, restore=is_scored)
        else:
            sampler = GroupSampler(group, self._special, banned, self._soft_embeddings)
        results = GroupResults()
        wants_logprobs = any(job.with_logprobs for job in group)
        logprobs: list[Tensor] = []
        start = 0
        for logits in self._logit_chunks(hidden, positions, group[0]):
            stop = start + len(logits)
            if wants_logprobs:  # before a draw changes the logits
                logprobs.append(logits.log_softmax(-1))
            chosen = []
            if start < num_drafts:
                drafted = logits if stop <= num_drafts else logits[: num_drafts - start]
                tokens = sampler.draw(drafted, start, results)
                results.tokens.append(tokens)
                chosen.append(tokens)
            if stop > num_drafts:
                chosen.append(scored[max(start - num_drafts, 0) : stop - num_drafts])
            if is_scored:
                ids = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
                probabilities = sampler.probabilities(logits)
                results.values.append(probabilities.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
            start = stop
        if wants_logprobs:
            _share_logprobs(group, torch.cat(logprobs), num_drafts)
        return results

    def _fill(self, group: Sequence[SamplingJob], results: GroupResults, numbers: Iterator[float]) -> None:
        """Fill a group's readings with the next transferred numbers, in the results' order."""
        for job in group:
            job.reading.tokens = [*map(int, islice(numbers, len(job.branch.draft_at)))]
        if results.values:
            for job in group:
                probabilities = [*islice(numbers, len(job.branch.draft_at))]
                if self._all_probabilities or job.draw.with_probability:
                    job.reading.probabilities = probabilities
            for job in group:
                job.reading.scores = [*islice(numbers, len(job.branch.score_at))]
        distributions = iter(results.distributions)
        for job in group:
            tokens = job.reading.tokens
            if results.statistics:
                job.reading.statistic = [*islice(numbers, len(tokens))]
            if results.distributions:
                job.reading.proposals = [*map(Proposal, tokens, distributions)]
            if job.constraint is not None:
                pairs = zip(_contexts(job), tokens, strict=True)
                job.reading.tokens = [job.constraint.settle(*context, token) for context, token in pairs]
        if results.best:
            self._fill_denoised(group, results, numbers)

    def _fill_denoised(self, group: Sequence[SamplingJob], results: GroupResults, numbers: Iterator[float]) -> None:
        """Fill the fields that only denoising draws have."""
        signals = torch.cat(results.signals) if results.signals else None
        start = 0
        for job in group:
            stop = start + len(job.branch.draft_at)
            job.reading.best = [*map(int, islice(numbers, stop - start))]
            job.reading.signal = None if signals is None else signals[start:stop]
            start = stop

    def _logit_chunks(
        self, hidden: Tensor, rows: Int[Tensor, " position"], job: SamplingJob
    ) -> Iterator[Float[Tensor, "position vocab"]]:
        """Yield logits in chunks: bounds the head's memory and, on CPUs, keeps the softmax in the processor's cache."""
        guidance = job.draw.guidance
        for some in _split(rows, max(1, _MAX_LOGITS // self._special.vocab_size)):
            logits = self._logits(hidden, some)
            if guidance is not None:
                unconditional = self._logits(hidden, some + job.guide)
                logits = _make_finite(unconditional + (guidance + 1.0) * (logits - unconditional))
            is_cached = logits.device.type == "cpu"
            yield from _split(logits, max(1, _MAX_SOFTMAX // logits.shape[1])) if is_cached else (logits,)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return finite logits in float32 or higher precision, in a tensor that may be changed in place."""
        logits = self._head(hidden.index_select(0, rows))
        return _make_finite(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits)


class GreedySampler:
    """Takes the most probable tokens for jobs without further options.

    Args:
        special: The model's special ids.
        banned: Ids below the vocabulary's size that are not drawn, on the logits' device.
        restore: Whether the logits are used afterwards, so that banned ids get their logits back.
    """

    def __init__(self, special: SpecialTokens, banned: Int[Tensor, " id"], *, restore: bool) -> None:
        self._vocab_size = special.vocab_size
        self._banned = banned
        self._restore = restore

    def draw(self, logits: Float[Tensor, "draft vocab"], first: int, results: GroupResults) -> Int[Tensor, " draft"]:  # noqa: ARG002
        """Return every row's most probable token."""
        banned_logits = logits.index_select(-1, self._banned) if self._restore else None
        logits.index_fill_(-1, self._banned, -math.inf)
        tokens = first_argmax(logits.narrow(-1, 0, self._vocab_size))
        if banned_logits is not None:  # probabilities are over all ids
            logits.index_copy_(-1, self._banned, banned_logits)
        return tokens

    def probabilities(self, logits: Float[Tensor, "position vocab"]) -> Float[Tensor, "position vocab"]:
        """Return all ids' probabilities."""
        return logits.softmax(-1)


class GroupSampler:
    """Samples tokens for jobs that share sampling options.

    Args:
        group: The jobs.
        special: The model's special ids.
        banned: Ids below the vocabulary's size that are not drawn, on the logits' device.
        soft_embeddings: Returns mean embeddings under distributions; see :meth:`LanguageModel.soft_embeddings`.
    """

    def __init__(
        self,
        group: Sequence[SamplingJob],
        special: SpecialTokens,
        banned: Int[Tensor, " id"],
        soft_embeddings: Callable[[Tensor], Tensor | None],
    ) -> None:
        draw = group[0].draw
        keys = [key for job in group for key in noise_keys(job.branch, job.draw, job.prompt.id)]
        proposals = [job.branch.proposals.get(offset) for job in group for offset in job.branch.draft_at]
        self._draw = draw
        self._embed = soft_embeddings
        self._vocab_size = special.vocab_size
        self._banned = banned
        self._eos = to_device(sorted(special.eos_token_ids), banned.device)
        self._keys = to_device(keys, banned.device)
        self._proposals = proposals if draw.proposes or group[0].branch.proposals else None
        self._allowed = [mask for job in group for mask in _allowed_ids(job)]
        self._is_in_span = [is_inside for job in group for is_inside in _find_span_drafts(job)]

    def draw(self, logits: Float[Tensor, "draft vocab"], first: int, results: GroupResults) -> Int[Tensor, " draft"]:
        """Draw a token from every row; append statistics and distributions.

        Args:
            logits: Some drafts' logits, not changed.
            first: The first draft's number among the group's drafts.
            results: Receives statistics and distributions.
        """
        draw = self._draw
        stop = first + len(logits)
        in_span = [row for row, is_inside in enumerate(self._is_in_span[first:stop]) if is_inside]
        allowed = logits.index_fill(-1, self._banned, -math.inf)
        allowed[:, self._vocab_size :] = -math.inf
        self._forbid_eos(allowed, in_span)
        for row, mask in enumerate(self._allowed[first:stop]):
            if mask is not None:
                allowed[row, : self._vocab_size].masked_fill_(~mask.to(logits.device), -math.inf)
        keys = self._keys[first:stop]
        if self._proposals is None:
            tokens = draw_tokens(allowed, draw.sampling, keys, top_p_first=draw.top_p_first)
        else:
            tokens = _propose_or_verify(allowed, draw, keys, self._proposals[first:stop], results)
        if draw.statistic is not None:
            seen = logits.index_fill(-1, to_device(draw.forbidden, logits.device), -math.inf)
            self._forbid_eos(seen, in_span)
            ranked = seen
            if draw.confidence != "raw":
                is_tempered = draw.confidence == "tempered"
                sampling = draw.sampling if is_tempered else replace(draw.sampling, temperature=1.0)
                ranked = filter_logits(seen, sampling, top_p_first=draw.top_p_first)
            results.statistics.append(draft_statistic(draw.statistic, seen, ranked, tokens))
        if draw.denoises:
            results.best.append(first_argmax(allowed))
            filtered = filter_logits(logits, draw.sampling, top_p_first=draw.top_p_first)
            signal = self._embed(filtered.softmax(-1))
            results.signals += [] if signal is None else [signal]
        return tokens

    def probabilities(self, logits: Float[Tensor, "position vocab"]) -> Float[Tensor, "position vocab"]:
        """Return all ids' probabilities; changes ``logits``."""
        if self._draw.confidence_forbidden:
            logits.index_fill_(-1, to_device(self._draw.confidence_forbidden, logits.device), -math.inf)
        if self._draw.confidence_temperature != 1:
            # Subtract the maximum, which keeps the result finite at any temperature.
            logits = (logits - logits.amax(-1, keepdim=True)) / self._draw.confidence_temperature
        return logits.softmax(-1)

    def _forbid_eos(self, logits: Tensor, rows: Sequence[int]) -> None:
        if rows:
            logits[to_device(rows, logits.device)[:, None], self._eos] = -math.inf


def _is_greedy(job: SamplingJob) -> bool:
    """Whether a job takes the fast path: greedy, without guidance, extra figures, template and constraint."""
    draw = job.draw
    is_bare = draw.guidance is None and not (draw.confidence_forbidden or draw.statistic or draw.denoises)
    is_bare = is_bare and draw.confidence_temperature == 1
    is_free = job.constraint is None and None not in job.prompt.given
    return is_bare and is_free and draw.sampling.temperature == 0


def _group_key(job: SamplingJob) -> tuple[object, ...]:
    """Return a job's group key, which is equal for jobs with equal sampling options."""
    draw = job.draw
    if _is_greedy(job):
        return draw.forbidden
    sampling = draw.sampling
    return (draw.forbidden, job.guide, bool(job.branch.proposals), sampling.temperature, sampling.top_p,
            sampling.top_k, draw.guidance, draw.confidence_forbidden, draw.confidence_temperature, draw.statistic,
            draw.confidence, draw.top_p_first, draw.denoises, draw.proposes)  # fmt: skip


def _share_logprobs(group: Sequence[SamplingJob], logprobs: Tensor, num_drafts: int) -> None:
    """Give the jobs that want log-probabilities their rows: drafts come first, then given tokens."""
    draft, score = 0, num_drafts
    for job in group:
        num, num_scores = len(job.branch.draft_at), len(job.branch.score_at)
        if job.with_logprobs:
            job.reading.logprobs = torch.cat((logprobs[draft : draft + num], logprobs[score : score + num_scores]))
        draft += num
        score += num_scores


def _make_finite(logits: Tensor) -> Tensor:
    """Replace NaN by the lowest number and clamp infinities, in place; -inf stays free to mark banned ids."""
    return logits.nan_to_num_(nan=torch.finfo(logits.dtype).min)


def _split(values: Tensor, size: int) -> Sequence[Tensor]:
    """Return chunks of at most ``size`` rows; most calls have a single chunk, which is not worth torch's function."""
    return values.split(size) if len(values) > size else (values,)


def _allowed_ids(job: SamplingJob) -> list[Tensor | None]:
    """Return which ids every draft may be, bool [vocab]; ``None`` allows all ids."""
    if job.constraint is None:
        return [None] * len(job.branch.draft_at)
    return [job.constraint.allowed_tokens(*context) for context in _contexts(job)]


def _contexts(job: SamplingJob) -> Iterator[tuple[int, list[int]]]:
    """Yield every draft's place and the response before it, as left-to-right decoders feed it."""
    branch = job.branch
    prompt_length = len(job.prompt.token_ids)
    first = branch.positions[0] - prompt_length
    for offset in branch.draft_at:
        before = [*job.canvas[: max(first, 0)], *branch.tokens[max(-first, 0) : offset + 1]]
        yield branch.positions[offset] + branch.shift - prompt_length, before


def _find_span_drafts(job: SamplingJob) -> list[bool]:
    """Return which drafts fill a template's span: the drafts before its last given token."""
    branch = job.branch
    prompt = job.prompt
    end = len(prompt.token_ids) + prompt.given_length if prompt.num_to_fill else 0
    return [branch.positions[offset] + branch.shift < end for offset in branch.draft_at]


def _propose_or_verify(
    logits: Float[Tensor, "draft vocab"], draw: Draw, keys: Int[Tensor, " draft"],
    proposals: Sequence[Proposal | None], results: GroupResults,
) -> Int[Tensor, " draft"]:  # fmt: skip
    """Draw by rejection sampling: keep or replace proposals; without a proposal, draw from the distribution."""
    probabilities = filter_logits(logits, draw.sampling, top_p_first=draw.top_p_first).softmax(-1)
    if draw.proposes:
        assert draw.sampling.temperature > 0, "a greedy draft has no distribution"
        results.distributions += probabilities.unbind()
    tokens = to_device([0 if proposal is None else proposal.token for proposal in proposals], logits.device)
    nothing = logits.new_zeros(logits.shape[-1])
    proposed = [nothing if proposal is None else proposal.probabilities for proposal in proposals]
    return keep_or_draw(probabilities, keys, tokens, torch.stack(proposed))


def filter_logits(
    logits: Float[Tensor, "position vocab"], sampling: SamplingParams, *, top_p_first: bool = False
) -> Float[Tensor, "position vocab"]:
    """Apply temperature, then top-k, then top-p.

    Top-k keeps all tokens that tie with the last token it keeps. Top-p keeps the most probable tokens up to and
    including the token that crosses ``top_p``; at least one token is kept.

    Args:
        logits: Finite, or -inf for banned ids; at least one logit is finite.
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
    """Return a noise key per draft. Keys depend on seed, prompt, round and predicted position alone.

    Args:
        branch: The branch whose drafts are drawn.
        draw: How they are drawn; greedy draws have no noise and get no keys.
        prompt_id: The prompt's id.
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

    Temperature 0 takes the most probable token; ties go to the lower id. Above 0, Gumbel noise is added to the filtered
    logits, which draws from their softmax. The noise is float64: lower precision would lower the effective temperature.

    Args:
        logits: Logits with banned ids at -inf.
        sampling: Sampling options.
        noise_keys: Noise key per position; empty at temperature 0.
        top_p_first: Apply top-p before top-k.
    """
    if sampling.temperature == 0:
        return first_argmax(logits)
    return _draw_with_noise(filter_logits(logits, sampling, top_p_first=top_p_first), noise_keys)


def _draw_with_noise(
    logits: Float[Tensor, "position vocab"], noise_keys: Int[Tensor, " position"]
) -> Int[Tensor, " position"]:
    """Draw from the softmax of logits, by Gumbel noise."""
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
        noise_keys: Noise key per position; must differ from the draft's key.
        drafts: A draft per position; any id where there is no draft.
        proposed: The drafts' distributions q; zeros where there is no draft.
    """
    residual = (probabilities - proposed).clamp_(min=0)
    # If p and q differ by rounding only, nothing may be left to draw from.
    residual = residual.where(residual.sum(-1, keepdim=True) > 0, probabilities)
    drawn = _draw_with_noise(residual.log(), noise_keys)
    noise = KeyedNoise(noise_keys).uniform("keep", 1)
    p, q = (distribution.gather(-1, drafts[:, None]) for distribution in (probabilities, proposed))
    is_kept = (noise * q < p) & (q > 0)
    return drafts.where(is_kept[:, 0], drawn)


def draft_statistic(
    name: str,
    logits: Float[Tensor, "position vocab"],
    filtered: Float[Tensor, "position vocab"],
    tokens: Int[Tensor, " position"],
) -> Float[Tensor, " position"]:
    """Compute a figure of the drafts' distributions, in float64; for its name see :class:`~refusion_lit.decoding.Draw`.

    Args:
        name: A ``Statistic``.
        logits: The logits before temperature and filters.
        filtered: The filtered logits.
        tokens: The drawn tokens.

    Raises:
        ValueError: If the name is unknown.
    """
    require_choice("statistic", name, get_args(Statistic))
    probability = filtered.double().softmax(-1)
    if name == "margin":
        top = probability.topk(2).values
        return top[:, 0] - top[:, 1]
    if name == "negative_entropy":
        return (probability * (probability + 1e-10).log()).sum(-1)
    if name == "probability":
        return probability.gather(-1, tokens[:, None])[:, 0]
    return torch.special.entr(logits.double().softmax(-1)).sum(-1)
