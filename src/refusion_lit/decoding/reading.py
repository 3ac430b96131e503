"""Reading logits: the head only at places that are read, and of its rows only what somebody wants to know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from refusion_lit.decoding.requests import Draw, Reading
from refusion_lit.decoding.sampling import draw, first_argmax
from refusion_lit.modeling.interface import LanguageModel

_MAX_LOGITS = 1 << 26
"""Logits held at a time (256 MB in float32); more places are read in chunks."""

_MAX_SOFTMAX = 1 << 20
"""Logits whose softmax is taken at a time on CPUs, so that it stays in the processor's cache."""


@dataclass(slots=True)
class Span:
    """Places of one branch that are read alike.

    Attributes:
        reading: Where what is read goes.
        draw: How tokens are drawn.
        index: The places, as indices into the hidden states.
        given: The token at each place whose probability is wanted; ``None`` where tokens are drawn.
        noise_keys: Key of each place's noise, where there is any.
        guide: Distance to each place's logits that guide it.
    """

    reading: Reading
    draw: Draw
    index: Sequence[int]
    given: Sequence[int] | None = None
    noise_keys: list[int] = field(default_factory=list)
    guide: int = 0


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
            if span.index:
                groups.setdefault(_kind(span.draw), []).append(span)
        if not groups:
            return
        ordered = [self._ordered(group) for group in groups.values()]
        found = [
            self._greedy(hidden, group) if len(kind) == 1 else _Thorough(self, hidden, group).found()
            for kind, group in zip(groups, ordered, strict=True)
        ]
        flat = (found[0] if len(found) == 1 else torch.cat(found)).tolist()
        start = 0
        for kind, group in zip(groups, ordered, strict=True):
            num_places, width = sum(len(span.index) for span in group), 2 + len(group[0].draw.statistics)
            columns = [flat[start + i * num_places : start + (i + 1) * num_places] for i in range(width)]
            start += num_places * width
            if len(kind) == 1 and self._is_broken(group, *columns):
                sampled = _Thorough(self, hidden, group).found().tolist()
                columns = [sampled[:num_places], sampled[num_places:]]
            self._fill(group, columns)

    def _ordered(self, group: list[Span]) -> list[Span]:
        """Put drafts without a probability first, then other drafts, then given tokens."""
        return sorted(group, key=lambda span: 2 if span.given is not None else int(self._wants_probability(span)))

    def _wants_probability(self, span: Span) -> bool:
        return span.given is not None or span.draw.with_probability or self._all_probabilities

    def _greedy(self, hidden: Tensor, group: list[Span]) -> Tensor:
        """Return tokens, then values: probabilities or, at drafts that want none, the tokens' logits.

        Logits are expected to be finite, and a value that is not finite says that they were not: nothing is spent on
        making them so beforehand.
        """
        index = [i for span in group for i in span.index]
        given = [token for span in group if span.given is not None for token in span.given]
        num_drafts = len(index) - len(given)
        num_silent = sum(len(span.index) for span in group if not self._wants_probability(span))
        at = torch.tensor([index, [0] * num_drafts + given], device=hidden.device)
        banned = self._banned_ids(group[0].draw.forbidden, hidden.device)
        step = max(1, _MAX_LOGITS // max(self._vocab_size, 1))
        tokens, values = [], []
        for start in range(0, len(index), step):
            places, own = at[:, start : start + step]
            logits = self.logits(hidden, places)
            end = start + len(logits)
            drafts, silent = (min(max(n - start, 0), end - start) for n in (num_drafts, num_silent))
            if drafts:
                own = torch.cat((self._choose(logits, drafts, silent, banned), own[drafts:]))
            tokens.append(own)
            if silent:
                values.append(logits[:silent].gather(-1, own[:silent, None])[:, 0])
            if silent < len(own):
                values.append(_probabilities(logits[silent:], own[silent:]))
        found = torch.cat(values) if len(values) > 1 else values[0]
        return torch.cat([one.to(found.dtype) for one in tokens] + [found])  # ids are exact in float32

    def _choose(self, logits: Tensor, drafts: int, silent: int, banned: Tensor) -> Tensor:
        """Return the most probable allowed token of the first rows; those from ``silent`` on are left as they were."""
        rows = logits[:drafts]
        kept = rows[silent:].index_select(-1, banned) if silent < drafts else None
        rows.index_fill_(-1, banned, -math.inf)
        tokens = first_argmax(rows[:, : self._vocab_size])
        if kept is not None:
            rows[silent:].index_copy_(-1, banned, kept)
        return tokens

    def _is_broken(self, group: list[Span], tokens: list[float], values: list[float]) -> bool:
        """Say whether not-a-number or infinity among the logits may have spoilt what was read."""
        drafts = tokens[: sum(len(span.index) for span in group if span.given is None)]
        forbidden = self._banned.union(group[0].draw.forbidden)
        return not (all(map(math.isfinite, values)) and forbidden.isdisjoint(drafts))

    def _fill(self, group: list[Span], columns: list[list[float]]) -> None:
        start = 0
        for span in group:
            stop, reading = start + len(span.index), span.reading
            tokens, values, *statistics = (column[start:stop] for column in columns)
            start = stop
            if span.given is not None:
                reading.scores.extend(values)
                continue
            reading.tokens.extend(map(int, tokens))
            if self._wants_probability(span):
                reading.probabilities.extend(values)
            for name, own in zip(span.draw.statistics, statistics, strict=True):
                reading.statistics.setdefault(name, []).extend(own)

    def logits(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Return logits in float32 or better, in a tensor that may be changed."""
        logits = self._model.logits(hidden[places])
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def allowed(self, logits: Tensor, forbidden: tuple[int, ...]) -> Tensor:
        """Return a copy of logits in which no decoder's choice, nor a forbidden one, has a chance."""
        allowed = logits.index_fill(-1, self._banned_ids(forbidden, logits.device), -math.inf)
        allowed[:, self._vocab_size :] = -math.inf
        return allowed

    def _banned_ids(self, forbidden: tuple[int, ...], device: torch.device) -> Tensor:
        if forbidden not in self._banned_on:
            ids = sorted(self._banned.union(forbidden))
            self._banned_on[forbidden] = torch.tensor(ids, dtype=torch.long, device=device)
        return self._banned_on[forbidden]


class _Thorough:
    """Reads one group in any way there is, and makes logits finite first."""

    def __init__(self, reader: Reader, hidden: Tensor, group: list[Span]) -> None:
        self._reader, self._hidden, self._how = reader, hidden, group[0].draw
        device = hidden.device
        self._index = torch.tensor([i for span in group for i in span.index], device=device)
        self._guides = torch.tensor([i + span.guide for span in group for i in span.index], device=device)
        given = [token for span in group if span.given is not None for token in span.given]
        self._num_drafts = len(self._index) - len(given)
        self._given = torch.tensor(given, dtype=torch.long, device=device)
        self._keys = torch.tensor([key for span in group for key in span.noise_keys], device=device)

    def found(self) -> Tensor:
        """Return tokens, then probabilities, then each wanted statistic."""
        step = max(1, _MAX_LOGITS // max(self._reader._vocab_size, 1))
        parts = [self._columns(start, start + step) for start in range(0, len(self._index), step)]
        return torch.cat(parts, 1).flatten()

    def _columns(self, start: int, stop: int) -> Tensor:
        how, num_drafts = self._how, self._num_drafts
        logits = _finite(self._reader.logits(self._hidden, self._index[start:stop]))
        if how.guidance is not None:
            unconditional = _finite(self._reader.logits(self._hidden, self._guides[start:stop]))
            logits = _finite(unconditional + (how.guidance + 1.0) * (logits - unconditional))
        drafts = min(max(num_drafts - start, 0), len(logits))
        tokens = self._given[max(start - num_drafts, 0) : max(stop - num_drafts, 0)]
        statistics = logits.new_zeros(len(how.statistics), len(logits), dtype=torch.float64)
        if drafts:  # where a token is given, none is drawn
            keys = self._keys[start : start + drafts] if how.sampling.temperature > 0 else None
            drawn = draw(self._reader.allowed(logits[:drafts], how.forbidden), how.sampling, keys)
            for number, values in enumerate(_statistics(how.statistics, drawn.filtered, drawn.tokens)):
                statistics[number, :drafts] = values
            tokens = torch.cat((drawn.tokens, tokens))
        if how.confidence_forbidden:
            logits[:, list(how.confidence_forbidden)] = -math.inf
        probabilities = _probabilities(logits, tokens)
        return torch.cat((torch.stack((tokens.double(), probabilities.double())), statistics))


def _kind(how: Draw) -> tuple[object, ...]:
    """Return what draws must have in common to be read together; greedy ones need nothing but the choice."""
    sampling = how.sampling
    if sampling.temperature == 0 and how.guidance is None and not (how.confidence_forbidden or how.statistics):
        return (how.forbidden,)
    return (how.forbidden, sampling.temperature, sampling.top_p, sampling.top_k, how.guidance,
            how.confidence_forbidden, how.statistics)  # fmt: skip


def _probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return each row's probability of its token."""
    step = len(logits) if logits.device.type != "cpu" else max(1, _MAX_SOFTMAX // logits.shape[-1])
    if step >= len(logits):
        return logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
    pairs = zip(logits.split(step), tokens.split(step), strict=True)
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
