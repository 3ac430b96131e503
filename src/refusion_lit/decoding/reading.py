"""Reading logits: the head only at places that are read, and of its rows only what somebody wants to know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from refusion_lit.decoding.reading_ahead import ReadAhead
from refusion_lit.decoding.requests import Draw
from refusion_lit.decoding.sampling import draw, first_argmax
from refusion_lit.decoding.span import Span
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.transfer import to_device, to_host

_MAX_LOGITS = 1 << 26
"""Logits held at a time (256 MB in float32); more places are read in chunks."""

_MAX_SOFTMAX = 1 << 20
"""Logits whose softmax is taken at a time on CPUs, so that it stays in the processor's cache."""


class Reader:
    """Fills readings.

    Args:
        model: Computes logits.
        all_probabilities: Read probabilities of drafts also where the draw does not ask for them (for traces).
    """

    def __init__(self, model: LanguageModel, *, all_probabilities: bool = False) -> None:
        self._model = model
        self._all_probabilities = all_probabilities
        self._vocab_size = model.special_tokens.vocab_size
        self._banned = frozenset(model.special_tokens.banned_token_ids)
        self._banned_on: dict[tuple[int, ...], Tensor] = {}

    def read(self, hidden: Tensor, spans: Sequence[Span]) -> None:
        """Fill the readings of spans: the only point of a forward where device and host meet.

        Args:
            hidden: Hidden states [place, hidden].
            spans: What is read, in the order in which readings are filled.
        """
        groups: dict[tuple[object, ...], list[Span]] = {}
        for span in spans:
            groups.setdefault(_kind(span.draw), []).append(span)
        groups = {kind: group for kind, group in groups.items() if any(span.index for span in group)}
        if not groups:
            return
        ordered = [self._ordered(group) for group in groups.values()]
        found: list[Tensor] = []
        aheads: list[ReadAhead | None] = []
        for kind, group in zip(groups, ordered, strict=True):
            how = group[0].draw
            found.append(self._greedy(hidden, group) if len(kind) == 1 else self._thorough(hidden, group).found())
            aheads.append(ReadAhead(group, hidden.device) if any(span.later for span in group) else None)
            if (ahead := aheads[-1]) is not None:
                num_drafts, num_places = _counts(group)
                values = found[-1][num_drafts : num_drafts + num_places]
                found.append(ahead.found(values, lambda places, keys, how=how: self._silent(hidden, how, places, keys)))
        flat = to_host(found[0] if len(found) == 1 else torch.cat(found))
        sizes = iter([len(one) for one in found])
        for kind, group, ahead in zip(groups, ordered, aheads, strict=True):
            size = next(sizes)
            columns, flat = _columns(group, flat[:size]), flat[size:]
            if len(kind) == 1 and self._is_broken(group[0].draw, *columns):
                columns = _columns(group, to_host(self._thorough(hidden, group).found()))
            self._fill(group, *columns)
            if ahead is not None:
                size = next(sizes)
                ahead.fill(flat[:size])
                flat = flat[size:]

    def _ordered(self, group: list[Span]) -> list[Span]:
        """Put drafts without a probability first, then other drafts, then given tokens."""
        return sorted(group, key=lambda span: 2 if span.given is not None else int(self._wants_probability(span)))

    def _wants_probability(self, span: Span) -> bool:
        return span.given is not None or span.draw.with_probability or self._all_probabilities

    def _greedy(self, hidden: Tensor, group: list[Span]) -> Tensor:
        """Return the drafts' tokens, then a value a place: its probability or, where none is wanted, its logit.

        Logits are expected to be finite, and a value that is not finite says that they were not: nothing is spent on
        making them so beforehand.
        """
        num_drafts, num_places = _counts(group)
        num_silent = sum(len(span.index) for span in group if not self._wants_probability(span))
        index = [i for span in group for i in span.index]
        numbers = to_device(index + _given(group), hidden.device)
        places, targets = numbers[:num_places], numbers[num_places:]
        banned = self._banned_ids(group[0].draw.forbidden, hidden.device)
        step = self._num_places_at_a_time
        tokens: list[Tensor] = []
        values: list[Tensor] = []
        for start in range(0, num_places, step):
            logits = self.rows(hidden, places[start : start + step])
            first_draft, first_given = max(num_silent - start, 0), max(num_drafts - start, 0)
            if first_draft:
                for column, more in zip((tokens, values), self._choose(logits[:first_draft], banned), strict=True):
                    column.append(more)
            if first_draft < first_given:
                for chunk in _chunks(logits[first_draft:first_given]):
                    probability = chunk.softmax(-1)  # of all ids, and then some of them are banned
                    tokens.append(self._choose(chunk, banned)[0])
                    values.append(probability.gather(-1, tokens[-1][:, None])[:, 0])
            if first_given < logits.shape[0]:
                first_target = max(start - num_drafts, 0)
                own = targets[first_target : first_target + logits.shape[0] - first_given]
                values.append(_probabilities(logits[first_given:], own))
        dtype = values[0].dtype  # holds ids exactly, from float32 on
        return torch.cat([*(one.to(dtype) for one in tokens), *values])

    @property
    def _num_places_at_a_time(self) -> int:
        return max(1, _MAX_LOGITS // max(self._vocab_size, 1))

    def _choose(self, logits: Tensor, banned: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most probable allowed token of each row and its logit, banning the others in place."""
        logits.index_fill_(-1, banned, -math.inf)
        if logits.shape[-1] > self._vocab_size:
            logits = logits[:, : self._vocab_size]
        tokens = first_argmax(logits)
        return tokens, logits.gather(-1, tokens[:, None])[:, 0]

    def _thorough(self, hidden: Tensor, group: list[Span]) -> _Thorough:
        index = [i for span in group for i in span.index]
        guides = [i + span.guide for span in group for i in span.index]
        keys = [key for span in group for key in span.noise_keys]
        numbers = [to_device(values, hidden.device) for values in (index, guides, _given(group), keys)]
        return _Thorough(self, hidden, group[0].draw, *numbers)

    def _silent(self, hidden: Tensor, how: Draw, places: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens whose probability nobody wants; return them and a finite value each if all is well."""
        if len(_kind(how)) > 1:
            found = _Thorough(self, hidden, how, places, places, places[:0], keys).found()
            return found[: len(places)], found[len(places) : 2 * len(places)]
        banned = self._banned_ids(how.forbidden, hidden.device)
        parts = [self._choose(self.rows(hidden, some), banned) for some in places.split(self._num_places_at_a_time)]
        tokens, values = (torch.cat(column) for column in zip(*parts, strict=True))
        return tokens, values

    def _is_broken(self, how: Draw, tokens: list[float], values: list[float]) -> bool:
        """Say whether not-a-number or infinity among the logits may have spoilt what was read."""
        return not (all(map(math.isfinite, values)) and self._banned.union(how.forbidden).isdisjoint(tokens))

    def _fill(self, group: list[Span], tokens: list[float], values: list[float], *statistics: list[float]) -> None:
        start = 0
        for span in group:
            stop, reading = start + len(span.index), span.reading
            own = values[start:stop]
            if span.given is not None:
                reading.scores.extend(own)
            else:
                reading.tokens.extend(map(int, tokens[start:stop]))
                if self._wants_probability(span):
                    reading.probabilities.extend(own)
                for name, more in zip(span.draw.statistics, statistics, strict=True):
                    reading.statistics.setdefault(name, []).extend(more[start:stop])
            start = stop

    def rows(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Return logits in float32 or better, in a tensor that may be changed."""
        logits = self._model.logits(hidden.index_select(0, places))
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def allowed(self, logits: Tensor, forbidden: tuple[int, ...]) -> Tensor:
        """Return a copy of logits in which no decoder's choice, nor a forbidden one, has a chance."""
        allowed = logits.index_fill(-1, self._banned_ids(forbidden, logits.device), -math.inf)
        allowed[:, self._vocab_size :] = -math.inf
        return allowed

    def _banned_ids(self, forbidden: tuple[int, ...], device: torch.device) -> Tensor:
        if forbidden not in self._banned_on:
            ids = sorted(self._banned.union(forbidden))
            self._banned_on[forbidden] = to_device(ids, device)
        return self._banned_on[forbidden]


class _Thorough:
    """Reads one group in any way there is, and makes logits finite first."""

    def __init__(
        self, reader: Reader, hidden: Tensor, how: Draw, index: Tensor, guides: Tensor, given: Tensor, keys: Tensor
    ) -> None:
        self._reader, self._hidden, self._how = reader, hidden, how
        self._index, self._guides, self._given, self._keys = index, guides, given, keys
        self._num_drafts = len(index) - len(given)

    def found(self) -> Tensor:
        """Return the drafts' tokens, then a probability a place, then each wanted statistic of the drafts."""
        step = self._reader._num_places_at_a_time
        parts = [self._read(start, start + step) for start in range(0, len(self._index), step)]
        tokens, values, statistics = (torch.cat(columns, -1) for columns in zip(*parts, strict=True))
        return torch.cat((tokens.double(), values.double(), statistics.flatten()))

    def _read(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        how, first_given = self._how, max(self._num_drafts - start, 0)
        logits = _finite(self._reader.rows(self._hidden, self._index[start:stop]))
        if how.guidance is not None:
            unconditional = _finite(self._reader.rows(self._hidden, self._guides[start:stop]))
            logits = _finite(unconditional + (how.guidance + 1.0) * (logits - unconditional))
        tokens, statistics = self._given[:0], logits.new_zeros(len(how.statistics), 0, dtype=torch.float64)
        if first_given:  # where a token is given, none is drawn
            keys = self._keys[start:stop] if how.sampling.temperature > 0 else None
            drawn = draw(self._reader.allowed(logits[:first_given], how.forbidden), how.sampling, keys)
            tokens = drawn.tokens
            if how.statistics:
                statistics = torch.stack(_statistics(how.statistics, drawn.filtered, drawn.tokens))
        if how.confidence_forbidden:
            logits.index_fill_(-1, to_device(how.confidence_forbidden, logits.device), -math.inf)
        first = max(start - self._num_drafts, 0)
        given = self._given[first : first + len(logits) - len(tokens)]
        return tokens, _probabilities(logits, torch.cat((tokens, given))), statistics


def _kind(how: Draw) -> tuple[object, ...]:
    """Return what draws must have in common to be read together; greedy ones need nothing but the choice."""
    sampling = how.sampling
    if sampling.temperature == 0 and how.guidance is None and not (how.confidence_forbidden or how.statistics):
        return (how.forbidden,)
    return (how.forbidden, sampling.temperature, sampling.top_p, sampling.top_k, how.guidance,
            how.confidence_forbidden, how.statistics)  # fmt: skip


def _counts(group: Sequence[Span]) -> tuple[int, int]:
    """Return the number of drafts, and of all places that are read."""
    num_places = sum(len(span.index) for span in group)
    return num_places - len(_given(group)), num_places


def _given(group: Sequence[Span]) -> list[int]:
    return [token for span in group if span.given is not None for token in span.given]


def _columns(group: list[Span], flat: list[float]) -> list[list[float]]:
    """Cut what was read for a group into tokens, values and statistics."""
    num_drafts, num_places = _counts(group)
    ends = accumulate((num_drafts, num_places, *[num_drafts] * len(group[0].draw.statistics)), initial=0)
    return [flat[start:stop] for start, stop in pairwise(ends)]


def _chunks(logits: Tensor) -> Sequence[Tensor]:
    """Cut rows into chunks whose softmax stays in a CPU's cache; on other devices there is one."""
    step = max(1, _MAX_SOFTMAX // logits.shape[-1])
    return (logits,) if logits.device.type != "cpu" or step >= logits.shape[0] else logits.split(step)


def _probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return each row's probability of its token."""
    chunks = _chunks(logits)
    if len(chunks) == 1:
        return logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
    pairs = zip(chunks, tokens.split(chunks[0].shape[0]), strict=True)
    return torch.cat([rows.softmax(-1).gather(-1, own[:, None])[:, 0] for rows, own in pairs])


def _finite(logits: Tensor) -> Tensor:
    """Make logits finite, not-a-number counting as impossible: -inf is kept for ids that are left out of a choice."""
    lowest, highest = torch.finfo(logits.dtype).min, torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=lowest, posinf=highest, neginf=lowest)


def _statistics(names: tuple[str, ...], filtered: Tensor, tokens: Tensor) -> list[Tensor]:
    if not names:
        return []
    probability = filtered.double().softmax(-1)
    values: list[Tensor] = []
    for name in names:
        if name == "margin":
            top = probability.topk(2).values
            values.append(top[:, 0] - top[:, 1])
        elif name == "negative_entropy":
            values.append((probability * (probability + 1e-10).log()).sum(-1))
        elif name == "filtered":
            values.append(probability.gather(-1, tokens[:, None])[:, 0])
        else:
            raise AssertionError(f"unknown statistic {name}")
    return values
