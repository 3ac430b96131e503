"""Reads tokens and probabilities from logits, with one device-to-host transfer for all reads of a call.

The steps are: gather hidden states, compute logits at the requested positions only, draw, transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from refusion_lit.engine.prefetch import Prefetch, PrefetchedGroups
from refusion_lit.engine.proposals import Proposal, Proposals
from refusion_lit.engine.requests import Branch, Draw, Reading
from refusion_lit.engine.sampling import (
    draft_statistics,
    draw_tokens,
    filter_logits,
    first_argmax,
    lowered,
    noise_keys,
)
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.transfer import to_device, to_host

_MAX_LOGITS = 1 << 26
"""Maximum number of logits in memory at once (256 MB in float32); more positions are read in chunks."""

_MAX_SOFTMAX = 1 << 20
"""Logits per softmax on CPUs: small enough to stay in the processor's cache."""


@dataclass(slots=True)
class Read:
    """Positions of one branch whose logits are read in the same way.

    Attributes:
        reading: Receives the result.
        draw: How tokens are drawn.
        index: The positions, as indices into the flattened hidden states.
        given: Tokens whose probabilities are requested, one for each index; ``None`` to draw tokens.
        noise_keys: Key of each draw's noise; empty for greedy draws.
        guide: Distance from each position to the position of its unconditional logits, for classifier-free guidance.
        proposals: The proposal at each position, ``None`` where there is none; empty if there are none at all.
        prefetch: Further positions, some of which are likely to be requested next.
    """

    reading: Reading
    draw: Draw
    index: Sequence[int]
    given: Sequence[int] | None = None
    noise_keys: Sequence[int] = ()
    guide: int = 0
    proposals: Sequence[Proposal | None] = ()
    prefetch: Prefetch | None = None

    @classmethod
    def drafts(
        cls, branch: Branch, draw: Draw, offsets: Sequence[int], *, prompt_id: str, start: int, length: int
    ) -> Read:
        """Return the read that drafts tokens at offsets of a branch.

        Args:
            branch: The branch.
            draw: How tokens are drawn.
            offsets: Offsets into the branch.
            prompt_id: Id of the prompt, which keys the noise.
            start: Index of the branch's first hidden state.
            length: Hidden states a row; the unconditional branch is the row after the conditional one.
        """
        keys, index = noise_keys(branch, offsets, draw, prompt_id), [start + offset for offset in offsets]
        proposals = [branch.proposals.get(offset) for offset in offsets] if branch.proposals else ()
        guide = 0 if draw.guidance is None else length
        return cls(Reading(), draw, index, noise_keys=keys, guide=guide, proposals=proposals)


class LogitReader:
    """Fills readings from hidden states.

    Args:
        model: The model, whose head computes the logits.
        all_probabilities: Read the probabilities of all drafts, requested or not (for traces).
    """

    def __init__(self, model: LanguageModel, *, all_probabilities: bool = False) -> None:
        self._model = model
        self._all_probabilities = all_probabilities
        self._vocab_size = model.special_tokens.vocab_size
        self._banned = frozenset(model.special_tokens.banned_token_ids)
        self._banned_on_device: dict[tuple[int, ...], Tensor] = {}

    def read(self, hidden: Shaped[Tensor, "position hidden"], reads: Sequence[Read]) -> None:
        """Fill the readings of ``reads``; the only point of a forward where the host waits for the device."""
        groups: dict[tuple[object, ...], list[Read]] = {}
        for read in reads:
            if read.index:
                groups.setdefault((*read.draw.kind, read.guide, bool(read.proposals)), []).append(read)
        launched = [_Group(self, hidden, group) for group in groups.values()]
        values = [group.launch() for group in launched]
        if not values:
            return
        numbers, start = to_host(values[0] if len(values) == 1 else torch.cat(values)), 0
        for group, part in zip(launched, values, strict=True):
            stop = start + part.shape[0]
            group.fill(numbers[start:stop])
            start = stop

    def wants_probability(self, read: Read) -> bool:
        """Whether a read's probabilities are used; otherwise it is unscored and the softmax is skipped."""
        return read.given is not None or read.draw.with_probability or self._all_probabilities

    def draw(
        self, hidden: Tensor, draw: Draw, rows: Int[Tensor, " position"], keys: Int[Tensor, " key"],
        given: Int[Tensor, " given"], *, num_unscored: int, guide: int = 0, proposals: Proposals | None = None,
        careful: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Draw tokens and read probabilities, chunk by chunk.

        Args:
            hidden: Hidden states [position, hidden].
            draw: How to draw.
            rows: Indices into ``hidden``: unscored drafts, other drafts, then given tokens.
            keys: Noise key of each draft; empty for greedy draws.
            given: The given tokens.
            num_unscored: Number of unscored drafts.
            guide: Distance to the unconditional rows.
            proposals: Proposals that the drafts verify or become; ``None``: no rejection sampling.
            careful: Replace NaN and infinities first. The greedy fast path skips this: a non-finite value shows in the
                result, and the group is then read again.

        Returns:
            The drafts' tokens; a value for each row, its probability or, for an unscored draft, its logit; the
            requested statistics [statistic, draft]. Each is ``None`` if it is empty.
        """
        num_drafts, at = rows.shape[0] - given.shape[0], 0
        tokens, values, statistics = [], [], []
        for logits in self._logit_chunks(hidden, draw, rows, guide, careful=careful):
            size = logits.shape[0]
            stop = at + size
            unscored, drafts = min(max(num_unscored - at, 0), size), min(max(num_drafts - at, 0), size)
            chosen = given[max(0, at - num_drafts) : max(0, stop - num_drafts)]
            if drafts:
                drawn, more = self._choose(logits, drafts, draw, keys[at:stop], proposals, restore=unscored < size)
                tokens.append(drawn)
                statistics += more
                chosen = torch.cat((drawn, chosen)) if drafts < size else drawn
            if draw.confidence_forbidden:
                logits.index_fill_(-1, to_device(draw.confidence_forbidden, logits.device), -math.inf)
            if unscored:
                values.append(logits[:unscored].gather(-1, chosen[:unscored, None])[:, 0])
            if unscored < size:
                kept = lowered(logits[unscored:], draw.confidence_dtype)
                values.append(kept.softmax(-1).gather(-1, chosen[unscored:, None])[:, 0].to(logits.dtype))
            at = stop
        return _joined(tokens), _joined(values), _joined(statistics)

    def _logit_chunks(
        self, hidden: Tensor, draw: Draw, rows: Tensor, guide: int, *, careful: bool
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
        self, logits: Tensor, num_drafts: int, draw: Draw, keys: Tensor, proposals: Proposals | None, *, restore: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Draw a token from each of the first rows, and compute the requested statistics [statistic, draft], if any."""
        if draw.forbidden not in self._banned_on_device:
            self._banned_on_device[draw.forbidden] = to_device(sorted(self.banned(draw)), logits.device)
        banned, rows = self._banned_on_device[draw.forbidden], logits[:num_drafts]
        if not draw.is_plain:
            allowed = rows.index_fill(-1, banned, -math.inf)
            allowed[:, self._vocab_size :] = -math.inf
            if proposals is None:
                tokens = draw_tokens(allowed, draw.sampling, keys, top_p_first=draw.top_p_first)
            else:
                tokens = proposals.draw(allowed, draw, keys)
            if not draw.statistics:
                return tokens, []
            seen = rows.index_fill(-1, to_device(draw.forbidden, rows.device), -math.inf) if draw.forbidden else rows
            filtered = filter_logits(seen, draw.sampling, top_p_first=draw.top_p_first)
            return tokens, [draft_statistics(draw.statistics, seen, filtered, tokens, draw.confidence_dtype)]
        kept = rows.index_select(-1, banned) if restore else None
        tokens = first_argmax(rows.index_fill_(-1, banned, -math.inf)[:, : self._vocab_size])
        if kept is not None:  # probabilities are over all ids
            rows.index_copy_(-1, banned, kept)
        return tokens, []

    def banned(self, draw: Draw) -> frozenset[int]:
        """Return the ids that a draw never produces."""
        return self._banned.union(draw.forbidden)


class _Group:
    """Reads with the same kind of draw, which share one run of the head and the transfer."""

    def __init__(self, reader: LogitReader, hidden: Tensor, reads: list[Read]) -> None:
        self._reader, self._hidden, self._draw = reader, hidden, reads[0].draw
        self._is_plain = self._draw.is_plain
        # Unscored drafts first, then other drafts, then given tokens.
        self._reads = sorted(reads, key=lambda r: 2 if r.given is not None else int(reader.wants_probability(r)))
        index = [i for read in self._reads for i in read.index]
        given = [token for read in self._reads for token in read.given or ()]
        keys = [key for read in self._reads for key in read.noise_keys]
        self._num_rows, self._num_drafts = len(index), len(index) - len(given)
        self._num_unscored = sum(len(read.index) for read in self._reads if not reader.wants_probability(read))
        sent, stop = to_device([*index, *given, *keys], hidden.device), len(index) + len(given)
        self._rows, self._given, self._keys = sent[: len(index)], sent[len(index) : stop], sent[stop:]
        self._prefetched: PrefetchedGroups | None = None
        self._proposals: Proposals | None = None
        if self._draw.proposes or reads[0].proposals:
            drafts = [read for read in self._reads if read.given is None]
            self._proposals = Proposals([p for read in drafts for p in read.proposals or [None] * len(read.index)])

    def launch(self) -> Tensor:
        """Queue all work on the device; return tokens, values, statistics and prefetched numbers as one vector."""
        careful = not self._is_plain
        parts = self._read(careful=careful)
        firsts = accumulate((len(read.index) for read in self._reads), initial=0)
        reads = zip(firsts, self._reads, strict=False)
        wanted = [(at, read.prefetch) for at, read in reads if read.prefetch is not None]
        if wanted:
            assert parts[1] is not None
            self._prefetched = likely = PrefetchedGroups(wanted, parts[1])
            options = {"num_unscored": likely.rows.shape[0], "careful": careful}
            drawn = self._reader.draw(self._hidden, self._draw, likely.rows, likely.keys, likely.rows[:0], **options)
            parts = (*parts, likely.chosen, *drawn[:2])
        return self._flat(parts)

    def fill(self, numbers: list[float]) -> None:
        """Distribute the transferred numbers to the readings."""
        num_drafts, num_rows = self._num_drafts, self._num_rows
        if self._prefetched is not None:
            self._prefetched.fill(numbers[num_drafts * (1 + len(self._draw.statistics)) + num_rows :])
        if self._is_plain and self._is_broken(numbers):
            numbers = to_host(self._flat(self._read(careful=True)))
        tokens, values, start = numbers[:num_drafts], numbers[num_drafts : num_drafts + num_rows], 0
        made = iter(()) if self._proposals is None else self._proposals.made([int(token) for token in tokens])
        for read in self._reads:
            stop, reading = start + len(read.index), read.reading
            if read.given is not None:
                reading.scores.extend(values[start:stop])
            else:
                reading.tokens.extend(map(int, tokens[start:stop]))
                reading.proposals.extend(islice(made, stop - start))
                if self._reader.wants_probability(read):
                    reading.probabilities.extend(values[start:stop])
                for number, name in enumerate(self._draw.statistics):
                    at = num_drafts * (1 + number) + num_rows
                    reading.statistics.setdefault(name, []).extend(numbers[at + start : at + stop])
            start = stop

    def _read(self, *, careful: bool) -> tuple[Tensor | None, ...]:
        rows, options = (self._rows, self._keys, self._given), {"num_unscored": self._num_unscored, "careful": careful}
        guide, proposals = self._reads[0].guide, self._proposals
        return self._reader.draw(self._hidden, self._draw, *rows, guide=guide, proposals=proposals, **options)

    def _flat(self, parts: Sequence[Tensor | None]) -> Tensor:
        """Return all parts as one vector of a type that holds ids exactly."""
        values = parts[1]
        is_single = self._is_plain and (values is None or values.dtype != torch.float64)
        dtype = torch.float32 if is_single else torch.float64
        return torch.cat([part.flatten() if part.dtype == dtype else part.flatten().to(dtype)
                          for part in parts if part is not None])  # fmt: skip

    def _is_broken(self, numbers: list[float]) -> bool:
        """Whether NaN or infinities among the logits may have made the result invalid."""
        is_finite = math.isfinite(sum(numbers[self._num_drafts : self._num_drafts + self._num_rows]))
        return not (is_finite and self._reader.banned(self._draw).isdisjoint(numbers[: self._num_drafts]))


def _finite(logits: Tensor) -> Tensor:
    """Replace NaN by the lowest number and clamp infinities; -inf stays free to mark ids that are left out."""
    lowest, highest = torch.finfo(logits.dtype).min, torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=lowest, posinf=highest, neginf=lowest)


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0] if parts else None


def _split(values: Tensor, size: int) -> Sequence[Tensor]:
    return values.split(size) if size < values.shape[0] else (values,)
