"""Reading logits: the head only at places that are read, and of its rows only what somebody wants to know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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

_Use = Callable[[list[float]], None]


class Reader:
    """Fills readings.

    Args:
        model: Computes logits.
        all_probabilities: Read probabilities of drafts also where the draw does not ask for them (for traces).

    Attributes:
        num_places_at_a_time: So many places' logits are held at most.
    """

    def __init__(self, model: LanguageModel, *, all_probabilities: bool = False) -> None:
        self._model = model
        self._all_probabilities = all_probabilities
        self._vocab_size = model.special_tokens.vocab_size
        self.num_places_at_a_time = max(1, _MAX_LOGITS // max(self._vocab_size, 1))
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
        parts = [part for kind, group in groups.items() for part in self._parts(hidden, group, greedy=len(kind) == 1)]
        if not parts:
            return
        numbers = to_host(parts[0][0] if len(parts) == 1 else torch.cat([found for found, _ in parts]))
        start = 0
        for found, use in parts:
            stop = start + found.shape[0]
            use(numbers[start:stop])
            start = stop

    def _parts(self, hidden: Tensor, group: list[Span], *, greedy: bool) -> Iterator[tuple[Tensor, _Use]]:
        """Read spans that are drawn alike; yield what was found, and what is to be done with it on the host."""
        if not any(span.index for span in group):
            return
        group = self._ordered(group)
        found = self._greedy(hidden, group) if greedy else self._thorough(hidden, group).found()
        yield found, lambda numbers: self._fill(hidden, group, numbers, greedy=greedy)
        if any(span.later is not None for span in group):
            ahead, how = ReadAhead(group, hidden.device), group[0].draw
            num_drafts, num_places = _counts(group)
            values = found[num_drafts : num_drafts + num_places]
            yield ahead.found(values, lambda places, keys: self._silent(hidden, how, places, keys)), ahead.fill

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
        numbers = to_device([i for span in group for i in span.index] + _given(group), hidden.device)
        places, given = numbers[:num_places], numbers[num_places:]
        banned = self._banned_ids(group[0].draw.forbidden, hidden.device)
        tokens: list[Tensor] = []
        values: list[Tensor] = []
        at = 0
        for some in self._some_at_a_time(places):
            for logits in _chunks(self.rows(hidden, some)):
                stop = at + logits.shape[0]
                silent, drafts = (max(0, min(number, stop) - at) for number in (num_silent, num_drafts))
                # Of all ids, and then some of them are banned.
                told = logits[silent:] if silent else logits
                probability = told.softmax(-1) if silent < logits.shape[0] else None
                own = given[max(0, at - num_drafts) : max(0, stop - num_drafts)]
                if drafts:
                    tokens.append(self._choose(logits[:drafts], banned))
                    own = torch.cat((tokens[-1], own)) if own.numel() else tokens[-1]
                if silent:
                    values.append(logits[:silent].gather(-1, own[:silent, None])[:, 0])
                if probability is not None:
                    values.append(probability.gather(-1, own[silent:, None])[:, 0])
                at = stop
        dtype = values[0].dtype  # holds ids exactly, from float32 on
        return torch.cat([*(one.to(dtype) for one in tokens), *values])

    def _some_at_a_time(self, places: Tensor) -> Sequence[Tensor]:
        return (places,) if places.shape[0] <= self.num_places_at_a_time else places.split(self.num_places_at_a_time)

    def _choose(self, logits: Tensor, banned: Tensor) -> Tensor:
        """Return the most probable allowed token of each row, banning the others in place."""
        logits.index_fill_(-1, banned, -math.inf)
        if logits.shape[-1] > self._vocab_size:
            logits = logits[:, : self._vocab_size]
        return first_argmax(logits)

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
        tokens: list[Tensor] = []
        values: list[Tensor] = []
        for some in self._some_at_a_time(places):
            logits = self.rows(hidden, some)
            tokens.append(self._choose(logits, banned))
            values.append(logits.gather(-1, tokens[-1][:, None])[:, 0])
        return torch.cat(tokens), torch.cat(values)

    def _is_broken(self, how: Draw, tokens: list[float], values: list[float]) -> bool:
        """Say whether not-a-number or infinity among the logits may have spoilt what was read."""
        if not (math.isfinite(sum(values)) and self._banned.isdisjoint(tokens)):
            return True
        return bool(how.forbidden) and not set(how.forbidden).isdisjoint(tokens)

    def _fill(self, hidden: Tensor, group: list[Span], numbers: list[float], *, greedy: bool) -> None:
        """Put into the readings what was found; read once more where logits were spoilt."""
        tokens, values, *statistics = _columns(group, numbers)
        if greedy and self._is_broken(group[0].draw, tokens, values):
            tokens, values, *statistics = _columns(group, to_host(self._thorough(hidden, group).found()))
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
        step = self._reader.num_places_at_a_time
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
    return sum(len(span.index) for span in group if span.given is None), num_places


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
