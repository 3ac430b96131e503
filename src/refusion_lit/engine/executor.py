"""Runs the requests of many prompts together: batches forwards into calls of the model and counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from refusion_lit.engine.batch import BatchLayout
from refusion_lit.engine.drafts import Drafts
from refusion_lit.engine.prefetch import Prefetch
from refusion_lit.engine.reading import LogitReader, Read
from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Reading, Request
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.transfer import to_device

_FEW_POSITIONS = 16
"""Up to this many positions, a CPU computes logits hardly slower than for one: reading the head's weights dominates."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A prompt in flight, as the executor sees it.

    Attributes:
        storage: Its row of the cache.
        prompt_id: Its id, which keys the sampling noise.
        request: The pending request to the model; ``None`` once the prompt is finished.
        forward: Its last forward.
        hidden: Hidden states of that forward, for further reads.
        prefetched: Tokens prefetched with that forward, by branch and offset; ``None`` if nothing is prefetched.
        holes_end: Position after the last given token. No end of sequence is drawn before it, since given text follows.
            0 without holes.
    """

    storage: int
    prompt_id: str
    request: Request | None = None
    forward: Forward | None = None
    hidden: Tensor | None = None
    prefetched: list[dict[int, int]] | None = field(default=None)
    holes_end: int = 0


class Executor:
    """Runs the requests of prompts in flight on a model, batched into as few calls as possible.

    Args:
        model: The model.
        num_rows: Maximum number of prompts in flight.
        all_probabilities: Read the probabilities of all drafts, requested or not (for traces).
        prefetches: Prefetch drafts that are likely to be requested next. By default on accelerators, where each
            device-to-host transfer makes the host wait. By default on CPUs only for a few drafts that do not depend on
            other drafts, to read the head's weights once instead of twice. Never for traces, which show what was
            requested.
        cache: A cache of the model with ``num_rows`` rows, whose entries are reused; ``None``: a new one.

    Attributes:
        cache: The cache; ``None`` if the model keeps no state (fakes).
        num_calls: Calls of the model so far.
        num_positions: Token positions computed so far, padding included.
        num_shared: Token positions copied from other rows so far, instead of computed.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_rows: int,
        *,
        all_probabilities: bool = False,
        prefetches: bool | None = None,
        cache: KVCache | None = None,
    ) -> None:
        self._model, self._device = model, model.device
        self.cache = model.make_cache(num_rows) if cache is None else cache
        self._reader = LogitReader(model, all_probabilities=all_probabilities)
        self._prefetches = False if all_probabilities else prefetches
        self.num_calls = self.num_positions = self.num_shared = 0

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache in bytes, which never shrinks."""
        return 0 if self.cache is None else self.cache.num_bytes

    @property
    def cache_bytes_per_token(self) -> float:
        """Memory in bytes of one cache entry: the keys and values of a token in all layers."""
        return 0.0 if self.cache is None else self.cache.num_bytes / (self.cache.num_rows * self.cache.capacity)

    def share(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` cache entries of storage row ``source`` to row ``target``."""
        assert self.cache is not None
        self.cache.copy(source, target, length)
        self.num_shared += length

    def run(self, rows: Sequence[Row]) -> list[list[Reading]]:
        """Answer the rows' requests in as few calls of the model as possible.

        Args:
            rows: Rows with a request: all forwards, or all further drafts.

        Returns:
            One reading for each branch of each row.
        """
        if isinstance(rows[0].request, MoreDrafts):
            return self._draft_more(rows)
        readings: dict[int, list[Reading]] = {}
        for cached in (True, False):
            chosen = [row for row in rows if isinstance(row.request, Forward) and row.request.cached is cached]
            if chosen:
                readings.update(zip(map(id, chosen), self._call(chosen), strict=True))
        return [readings[id(row)] for row in rows]

    def _draft_more(self, rows: Sequence[Row]) -> list[list[Reading]]:
        """Draft from the hidden states of each row's last forward, without a call of the model."""
        results: list[list[Reading]] = []
        drafts: list[Drafts] = []
        hidden: list[Tensor] = []
        base = 0
        for row in rows:
            request, forward = row.request, row.forward
            assert isinstance(request, MoreDrafts)
            assert forward is not None
            assert row.hidden is not None
            known = _known(row, forward, request)
            if known is not None:
                results.append(known)
                continue
            length = row.hidden.shape[1]
            parts = zip(forward.branches, request.draft_at, forward.starts(length), strict=True)
            own = [self._drafts(row, branch, request.draw, at, base + start, length) for branch, at, start in parts]
            drafts += own
            results.append([drafted.reading for drafted in own])
            hidden.append(row.hidden.flatten(0, 1))
            base += len(hidden[-1])
        if drafts:
            reads = [read for drafted in drafts for read in drafted.reads]
            self._reader.read(torch.cat(hidden) if len(hidden) > 1 else hidden[0], reads)
            for drafted in drafts:
                drafted.merge()
        return results

    def _call(self, rows: Sequence[Row]) -> list[list[Reading]]:
        """Run the forwards of rows in one call of the model; all of them use the cache, or none does."""
        forwards = [row.request for row in rows if isinstance(row.request, Forward)]
        batch = BatchLayout(forwards)
        cache = self.cache if forwards[0].cached else None
        if cache is not None:
            for row, forward in zip(rows, forwards, strict=True):
                if forward.keep is not None:
                    cache.compact(row.storage, list(forward.keep.indices), forward.keep.num_leading)
            cache.prepare(*batch.cache_plan([row.storage for row in rows], self._device))
        ids, positions = (to_device(values, self._device) for values in (batch.ids, batch.positions))
        hidden = self._model.hidden_states(ids, positions, batch.visibility, cache)
        self.num_calls += 1
        self.num_positions += batch.ids.numel()
        prefetches = self._prefetch(forwards)
        results: list[list[Reading]] = []
        drafts: list[Drafts] = []
        reads: list[Read] = []
        early: list[tuple[dict[int, int], Sequence[int], Reading]] = []
        states = [hidden.flatten(0, 1)]
        for row, forward, part, starts in zip(rows, forwards, batch.sequences, batch.starts, strict=True):
            twin = None
            if forward.twin_at is not None:
                assert row.hidden is not None
                twin = sum(map(len, states)) + forward.twin_at
                states.append(row.hidden.flatten(0, 1))
            row.forward, row.hidden = forward, hidden[part]
            # Prefetching supports a single draw, but inside holes the draw forbids EOS: no prefetching with holes.
            row.prefetched = [{} for _ in forward.branches] if prefetches and not row.holes_end else None
            own, more = self._reads_of(row, forward, starts, hidden.shape[1], twin)
            results.append([drafted.reading for drafted in own])
            drafts += own
            reads += more
            for tokens, offsets, read in self._early_reads(row, forward, starts, hidden.shape[1]):
                reads.append(read)
                early.append((tokens, offsets, read.reading))
        self._reader.read(torch.cat(states) if len(states) > 1 else states[0], reads)
        for drafted in drafts:
            drafted.merge()
        for tokens, offsets, reading in early:
            tokens.update(zip(offsets, reading.tokens, strict=True))
        return results

    def _prefetch(self, forwards: Sequence[Forward]) -> bool:
        """Whether a call prefetches."""
        if self._prefetches is not None:
            return self._prefetches
        if self._device.type != "cpu":
            return True
        wanted = [branch for forward in forwards for branch in forward.branches if branch.prefetch_at]
        number = sum(len(group) for branch in wanted for group in branch.prefetch_at)
        return number <= _FEW_POSITIONS and not any(branch.draft_at for branch in wanted)

    def _reads_of(
        self, row: Row, forward: Forward, starts: Sequence[int], length: int, twin: int | None
    ) -> tuple[list[Drafts], list[Read]]:
        """Return the drafts of each branch of a forward, and the reads that fill them and the scores.

        Args:
            row: The prompt.
            forward: Its forward.
            starts: Index of the first hidden state of each branch.
            length: Hidden states a row.
            twin: Index of the hidden state that guides the first draft; ``None``: the one in the next row.
        """
        drafts: list[Drafts] = []
        reads: list[Read] = []
        for number, (branch, start) in enumerate(zip(forward.branches, starts, strict=True)):
            own = self._drafts(row, branch, forward.draw, branch.draft_at, start, length)
            drafts.append(own)
            if twin is not None and branch.draft_at:
                for read in own.reads:
                    read.guide = twin - start - branch.draft_at[0]
            read = own.reads[0]
            if row.prefetched is not None and branch.prefetch_at and branch.draft_at and not read.guide:
                read.prefetch = Prefetch.of(branch, forward.draw, row.prompt_id, start, tokens=row.prefetched[number])
            reads += own.reads
            if branch.score_at:
                offsets, given = zip(*branch.score_at, strict=True)
                reads.append(Read(own.reading, forward.draw, [start + o for o in offsets], given, guide=read.guide))
        return drafts, reads

    @staticmethod
    def _early_reads(
        row: Row, forward: Forward, starts: Sequence[int], length: int
    ) -> Iterator[tuple[dict[int, int], Sequence[int], Read]]:
        """Yield the prefetches that depend on no draft: destination of their tokens, their offsets, and the read."""
        if row.prefetched is None or forward.draw.guidance is not None:
            return
        draw = replace(forward.draw, with_probability=False)
        for branch, start, tokens in zip(forward.branches, starts, row.prefetched, strict=True):
            if branch.prefetch_at and not branch.draft_at:
                offsets = list(chain.from_iterable(branch.prefetch_at))
                yield tokens, offsets, Read.drafts(branch, draw, offsets, prompt_id=row.prompt_id, start=start,
                                                   length=length)  # fmt: skip

    def _drafts(self, row: Row, branch: Branch, draw: Draw, offsets: Sequence[int], start: int, length: int) -> Drafts:
        ends = self._model.special_tokens.eos_token_ids
        return Drafts(branch, draw, offsets, holes_end=row.holes_end, ends=ends, prompt_id=row.prompt_id, start=start,
                      length=length)  # fmt: skip


def _known(row: Row, forward: Forward, request: MoreDrafts) -> list[Reading] | None:
    """Answer a request from the prefetched tokens; ``None`` if a token is missing or the request's draw differs."""
    if row.prefetched is None or request.draw != replace(forward.draw, with_probability=False):
        return None
    pairs = list(zip(row.prefetched, request.draft_at, strict=True))
    if not all(tokens.keys() >= set(offsets) for tokens, offsets in pairs):
        return None
    return [Reading(tokens=[tokens[offset] for offset in offsets]) for tokens, offsets in pairs]
