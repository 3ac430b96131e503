"""Reads tokens and probabilities from hidden states, with one device-to-host transfer for all rows of a call.

The steps are: gather hidden states, compute logits at the requested positions only, draw, transfer, scatter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from refusion_lit.engine.requests import Branch, Draw, Proposal, Reading
from refusion_lit.engine.sampling import (
    draft_statistics,
    draw_tokens,
    filter_logits,
    first_argmax,
    keep_or_draw,
    lowered,
    noise_keys,
)
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.transfer import to_device, to_host

_MAX_LOGITS = 1 << 26
"""Maximum number of logits in memory at once (256 MB in float32); more positions are read in chunks."""

_MAX_SOFTMAX = 1 << 20
"""Logits per softmax on CPUs: small enough to stay in the processor's cache."""


@dataclass(slots=True, kw_only=True)
class Read:
    """What is read from one branch: tokens drawn at some positions, probabilities of given tokens at others.

    Attributes:
        draw: How tokens are drawn.
        drafts: Where they are drawn, as indices into the flattened hidden states.
        keys: Key of each draw's noise; empty for greedy draws.
        in_span: Which drafts are tokens of a template's span, where no EOS is drawn; empty: none.
        proposals: The proposal of each draft, ``None`` where there is none; empty if there are none at all.
        allowed: Which ids each draft may be, bool [vocab], ``None`` where all may; empty: no constraint.
        contexts: Place and tokens before each draft, as the constraint was asked; empty: no constraint.
        scored: Where probabilities of given tokens are read.
        given: These tokens.
        guide: Distance from each position to that of its unconditional logits, for classifier-free guidance.
        reading: Receives the result.
    """

    draw: Draw
    drafts: Sequence[int]
    keys: Sequence[int] = ()
    in_span: Sequence[bool] = ()
    proposals: Sequence[Proposal | None] = ()
    allowed: Sequence[Tensor | None] = ()
    contexts: Sequence[tuple[int, list[int]]] = ()
    scored: Sequence[int] = ()
    given: Sequence[int] = ()
    guide: int = 0
    reading: Reading = field(default_factory=Reading)

    @classmethod
    def of(
        cls, branch: Branch, draw: Draw, draft_at: Sequence[int], *, prompt_id: str, start: int, spans_end: int = 0
    ) -> Read:
        """Return the read that drafts tokens at offsets of a branch.

        Args:
            branch: The branch.
            draw: How tokens are drawn.
            draft_at: Offsets into the branch.
            prompt_id: Id of the prompt, which keys the noise.
            start: Index of the branch's first hidden state.
            spans_end: Position after the last given token; positions before it are in spans or given. 0: no template.
        """
        return cls(
            draw=draw,
            drafts=[start + offset for offset in draft_at],
            keys=noise_keys(branch, draft_at, draw, prompt_id),
            in_span=[branch.positions[at] + branch.shift < spans_end for at in draft_at] if spans_end else (),
            proposals=[branch.proposals.get(offset) for offset in draft_at] if branch.proposals else (),
        )


class Reader:
    """Fills readings from hidden states.

    Args:
        model: The model, whose head computes the logits.
        all_probabilities: Read the probabilities of all drafts, requested or not (for traces).
    """

    def __init__(self, model: LanguageModel, *, all_probabilities: bool = False) -> None:
        special = model.special_tokens
        self._model = model
        self._all_probabilities = all_probabilities
        self._vocab_size = special.vocab_size
        self._banned = frozenset(special.banned_token_ids)
        self._ends = sorted(special.eos_token_ids)
        self._ids_on_device: dict[frozenset[int], Tensor] = {}

    def read(self, hidden: Shaped[Tensor, "position hidden"], reads: Sequence[Read]) -> None:
        """Fill the readings of ``reads``; the only point of a forward where the host waits for the device."""
        groups: dict[tuple[object, ...], list[Read]] = {}
        for read in reads:
            if read.drafts or read.scored:
                key = (read.draw.kind, read.guide, bool(read.proposals), bool(read.allowed))
                groups.setdefault(key, []).append(read)
        waiting = [(group, self._draw(hidden, group, careful=not group[0].draw.is_plain)) for group in groups.values()]
        if not waiting:
            return
        numbers = iter(_transferred([drawn for _, drawn in waiting]))
        for group, drawn in waiting:
            tokens, values, statistics = next(numbers)
            if group[0].draw.is_plain and self._is_broken(group[0].draw, tokens, values):
                drawn = self._draw(hidden, group, careful=True)
                [(tokens, values, statistics)] = _transferred([drawn])
            _fill(group, tokens, values, statistics, drawn.distributions, every=self._all_probabilities)

    def _wants_probability(self, group: Sequence[Read]) -> bool:
        """Whether the drafts' probabilities are used; otherwise the softmax is skipped."""
        return self._all_probabilities or any(read.draw.with_probability for read in group)

    def _draw(self, hidden: Tensor, group: Sequence[Read], *, careful: bool) -> _Drawn:
        """Queue all work of reads that draw in the same way: drafts first, then given tokens, in chunks.

        Args:
            hidden: Hidden states [position, hidden].
            group: The reads.
            careful: Replace NaN and infinities first. The greedy fast path skips this: a NaN shows in the result, and
                the group is then read again.
        """
        draw = group[0].draw
        drafts = [*chain.from_iterable(read.drafts for read in group)]
        index = [*drafts, *chain.from_iterable(read.scored for read in group)]
        given = [*chain.from_iterable(read.given for read in group)]
        keys = [*chain.from_iterable(read.keys for read in group)]
        in_span = self._rows_in_spans(group)
        num_drafts = len(drafts)
        scored = self._wants_probability(group) or bool(given)
        # One host-to-device copy for everything.
        sent = to_device([*index, *given, *keys], hidden.device)
        rows, fixed, noise = sent.split((len(index), len(given), len(keys)))
        proposals = None
        if draw.proposes or group[0].proposals:
            proposals = [p for read in group for p in read.proposals or [None] * len(read.drafts)]
        masks = [mask for read in group for mask in read.allowed]
        drawn = _Drawn()
        at = 0
        for logits in self._logit_chunks(hidden, draw, rows, group[0].guide, careful=careful):
            stop = at + logits.shape[0]
            size = min(max(num_drafts - at, 0), stop - at)
            chosen = fixed[max(0, at - num_drafts) : max(0, stop - num_drafts)]
            if size:
                in_chunk = [row - at for row in in_span if at <= row < at + size]
                some = None if proposals is None else proposals[at : at + size]
                tokens = self._choose(
                    logits, size, draw, noise[at : at + size], in_chunk, masks[at : at + size], some, drawn,
                    restore=scored,
                )  # fmt: skip
                chosen = torch.cat((tokens, chosen)) if size < stop - at else tokens
            if draw.confidence_forbidden:
                logits.index_fill_(-1, to_device(draw.confidence_forbidden, logits.device), -math.inf)
            if scored:
                logits = lowered(logits, draw.confidence_dtype).softmax(-1).to(logits.dtype)
            drawn.values.append(logits.gather(-1, chosen[:, None])[:, 0])
            at = stop
        return drawn

    def _rows_in_spans(self, group: Sequence[Read]) -> list[int]:
        """Return which drafts of a group are in spans, as indices into all of its drafts."""
        rows = []
        first = 0
        for read in group:
            rows += [first + place for place, inside in enumerate(read.in_span) if inside]
            first += len(read.drafts)
        return rows

    def _logit_chunks(
        self, hidden: Tensor, draw: Draw, rows: Int[Tensor, " position"], guide: int, *, careful: bool
    ) -> Iterator[Float[Tensor, "position vocab"]]:
        """Yield logits in chunks: bounds the head's memory and, on CPUs, keeps the softmax in the processor's cache."""
        for some in _split(rows, max(1, _MAX_LOGITS // self._vocab_size)):
            logits = self._logits(hidden, some, careful=careful)
            if draw.guidance is not None:
                unconditional = self._logits(hidden, some + guide, careful=True)
                logits = _finite(unconditional + (draw.guidance + 1.0) * (logits - unconditional))
            is_cached = logits.device.type == "cpu"
            yield from _split(logits, max(1, _MAX_SOFTMAX // logits.shape[1])) if is_cached else (logits,)

    def _logits(self, hidden: Tensor, rows: Tensor, *, careful: bool) -> Tensor:
        """Return logits in float32 or higher precision, in a tensor that may be changed in place."""
        logits = self._model.logits(hidden.index_select(0, rows))
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return _finite(logits) if careful else logits

    def _choose(
        self, logits: Tensor, num_drafts: int, draw: Draw, keys: Tensor, in_span: Sequence[int],
        masks: Sequence[Tensor | None], proposals: Sequence[Proposal | None] | None, drawn: _Drawn, *, restore: bool,
    ) -> Tensor:  # fmt: skip
        """Draw a token from each of the first rows of a chunk; append it, and the statistics, to ``drawn``."""
        rows = logits[:num_drafts]
        banned = self._on_device(self._banned.union(draw.forbidden), logits.device)
        if draw.is_plain and not in_span and not masks:
            kept = rows.index_select(-1, banned) if restore else None
            tokens = first_argmax(rows.index_fill_(-1, banned, -math.inf)[:, : self._vocab_size])
            if kept is not None:  # probabilities are over all ids
                rows.index_copy_(-1, banned, kept)
        else:
            allowed = rows.index_fill(-1, banned, -math.inf)
            allowed[:, self._vocab_size :] = -math.inf
            if in_span:
                spans = to_device(in_span, logits.device)
                allowed[spans[:, None], to_device(self._ends, logits.device)] = -math.inf
            for row, mask in enumerate(masks):
                if mask is not None:
                    allowed[row, : self._vocab_size].masked_fill_(~mask.to(logits.device), -math.inf)
            if proposals is None:
                tokens = draw_tokens(allowed, draw.sampling, keys, top_p_first=draw.top_p_first)
            else:
                tokens = _propose_or_verify(allowed, draw, keys, proposals, drawn)
            if draw.statistics:
                seen = rows
                if draw.forbidden or in_span:
                    seen = rows.index_fill(-1, to_device(draw.forbidden, rows.device), -math.inf)
                    seen[to_device(in_span, rows.device)[:, None], to_device(self._ends, rows.device)] = -math.inf
                filtered = filter_logits(seen, draw.sampling, top_p_first=draw.top_p_first)
                drawn.statistics.append(
                    draft_statistics(draw.statistics, seen, filtered, tokens, draw.confidence_dtype)
                )
        drawn.tokens.append(tokens)
        return tokens

    def _on_device(self, ids: frozenset[int], device: torch.device) -> Tensor:
        if ids not in self._ids_on_device:
            self._ids_on_device[ids] = to_device(sorted(ids), device)
        return self._ids_on_device[ids]

    def _is_broken(self, draw: Draw, tokens: Sequence[int], values: Sequence[float]) -> bool:
        """Whether NaN or infinities among the logits may have made the result invalid."""
        return not (math.isfinite(sum(values)) and self._banned.union(draw.forbidden).isdisjoint(tokens))


@dataclass(slots=True)
class _Drawn:
    """Results of a group on the device, chunk by chunk.

    Attributes:
        tokens: The drafts.
        values: For each draft and each given token its probability or, if no probabilities are wanted, its logit.
        statistics: The requested statistics [statistic, draft].
        distributions: Distribution of each draft, if the draw proposes.
    """

    tokens: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)


def _propose_or_verify(
    logits: Float[Tensor, "draft vocab"], draw: Draw, keys: Int[Tensor, " draft"],
    proposals: Sequence[Proposal | None], drawn: _Drawn,
) -> Int[Tensor, " draft"]:  # fmt: skip
    """Draw by rejection sampling: keep proposals or replace them; where there is none, draw from the distribution."""
    probabilities = filter_logits(logits, draw.sampling, top_p_first=draw.top_p_first).softmax(-1)
    if draw.proposes:
        drawn.distributions += probabilities.unbind()
    tokens = to_device([0 if proposal is None else proposal.token for proposal in proposals], logits.device)
    nothing = logits.new_zeros(logits.shape[-1])
    proposed = [nothing if proposal is None else proposal.probabilities for proposal in proposals]
    return keep_or_draw(probabilities, keys, tokens, torch.stack(proposed))


def _transferred(drawn: Sequence[_Drawn]) -> list[tuple[list[int], list[float], list[list[float]]]]:
    """Return each group's tokens, values and statistics as numbers, with one transfer from an accelerator."""
    parts = [part for group in drawn for part in (group.tokens, group.values, group.statistics)]
    tensors = [(torch.cat(part, -1) if len(part) > 1 else part[0]) if part else None for part in parts]
    present = [tensor for tensor in tensors if tensor is not None]
    if present[0].device.type == "cpu":
        numbers = [[] if tensor is None else tensor.tolist() for tensor in tensors]
    else:
        # float64 holds ids exactly.
        flat = iter(to_host(torch.cat([tensor.flatten().double() for tensor in present])))
        numbers = [[] if tensor is None else _shaped(flat, tensor.shape) for tensor in tensors]
    return [([int(token) for token in numbers[i]], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]


def _shaped(flat: Iterator[float], shape: torch.Size) -> list:
    """Take the next numbers and return them as lists of one or two axes."""
    if len(shape) == 1:
        return [next(flat) for _ in range(shape[0])]
    return [[next(flat) for _ in range(shape[1])] for _ in range(shape[0])]


def _fill(
    group: Sequence[Read], tokens: list[int], values: list[float], statistics: list[list[float]],
    distributions: Sequence[Tensor], *, every: bool,
) -> None:  # fmt: skip
    """Scatter a group's numbers to its readings."""
    first = 0
    first_given = len(tokens)
    for read in group:
        reading = read.reading
        stop = first + len(read.drafts)
        reading.tokens = tokens[first:stop]
        if every or read.draw.with_probability:
            reading.probabilities = values[first:stop]
        for name, figures in zip(read.draw.statistics, statistics, strict=False):
            reading.statistics[name] = figures[first:stop]
        if distributions:
            reading.proposals = list(map(Proposal, reading.tokens, distributions[first:stop]))
        stop_given = first_given + len(read.given)
        reading.scores = values[first_given:stop_given]
        first = stop
        first_given = stop_given


def _finite(logits: Tensor) -> Tensor:
    """Replace NaN by the lowest number and clamp infinities; -inf stays free to mark ids that are left out."""
    lowest = torch.finfo(logits.dtype).min
    highest = torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=lowest, posinf=highest, neginf=lowest)


def _split(values: Tensor, size: int) -> Sequence[Tensor]:
    return values.split(size) if size < values.shape[0] else (values,)
