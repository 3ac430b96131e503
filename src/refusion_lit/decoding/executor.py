"""Batches the forwards of many prompts into calls of the model, and counts them where they happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from refusion_lit.decoding.reading import Reader
from refusion_lit.decoding.requests import Branch, Forward, MoreDrafts, Reading
from refusion_lit.decoding.span import Span, add_spans
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.transfer import to_device


@dataclass(slots=True)
class _Held:
    """What is left of a prompt's last forward, for further reads: hidden states, and tokens that were read ahead."""

    hidden: Tensor
    forward: Forward
    ahead: list[dict[int, int]] | None

    def known(self, request: MoreDrafts) -> list[Reading] | None:
        """Answer a request from what was read ahead; ``None`` if something is missing, or is to be drawn otherwise."""
        if self.ahead is None or request.draw != replace(self.forward.draw, with_probability=False):
            return None
        pairs = list(zip(self.ahead, request.draft_at, strict=True))
        if not all(ahead.keys() >= set(offsets) for ahead, offsets in pairs):
            return None
        return [Reading(tokens=[ahead[offset] for offset in offsets]) for ahead, offsets in pairs]


class Executor:
    """Runs requests of several prompts together.

    Args:
        model: The model.
        num_rows: Prompts that are decoded at a time.
        all_probabilities: Read probabilities of all drafts, wanted or not (for traces).
        reads_ahead: Read tokens that will probably be asked for together with what tells which; ``None``: where the
            host would have to wait for the device once more, which is everywhere but on CPUs. Traces show what a
            decoder asked for, so nothing is read ahead for them.

    Attributes:
        num_calls: Calls of the model so far.
        num_positions: Token positions computed so far, padding included.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_rows: int,
        *,
        all_probabilities: bool = False,
        reads_ahead: bool | None = None,
    ) -> None:
        self._model = model
        self._device = model.device
        self._cache = model.make_cache(num_rows)
        self._held: dict[int, _Held] = {}
        self._reader = Reader(model, all_probabilities=all_probabilities)
        self._reads_ahead = (
            self._device.type != "cpu" if reads_ahead is None else reads_ahead
        ) and not all_probabilities
        self.num_calls = 0
        self.num_positions = 0

    def forward(self, requests: Sequence[tuple[int, str, Forward]]) -> list[list[Reading]]:
        """Run forwards of several prompts in as few calls as possible.

        Args:
            requests: Storage row, prompt id and forward of each prompt.

        Returns:
            For each prompt one reading a branch.
        """
        results: list[list[Reading]] = [[] for _ in requests]
        for cached in (True, False):
            chosen = [i for i, (_, _, forward) in enumerate(requests) if forward.cached is cached]
            if chosen:
                readings = self._call([requests[i] for i in chosen], cached=cached)
                for i, reading in zip(chosen, readings, strict=True):
                    results[i] = reading
        return results

    def more(self, requests: Sequence[tuple[int, str, MoreDrafts]]) -> list[list[Reading]]:
        """Draw further tokens from the hidden states of each prompt's last forward, without a call of the model."""
        spans: list[Span] = []
        results: list[list[Reading]] = []
        hidden: list[Tensor] = []
        base = 0
        for row, prompt_id, request in requests:
            held = self._held[row]
            known = held.known(request)
            if known is not None:
                results.append(known)
                continue
            length = held.hidden.shape[1]
            starts = [base + start for start in held.forward.starts(length)]
            own = (held.forward.branches, request.draw, prompt_id, starts, length)
            results.append(add_spans(spans, *own, draft_at=request.draft_at))
            hidden.append(held.hidden.flatten(0, 1))
            base += held.hidden.shape[0] * length
        if spans:
            self._reader.read(torch.cat(hidden) if len(hidden) > 1 else hidden[0], spans)
        return results

    def release(self, row: int) -> None:
        """Forget what is held for a row whose prompt is done."""
        self._held.pop(row, None)

    def _call(self, requests: Sequence[tuple[int, str, Forward]], *, cached: bool) -> list[list[Reading]]:
        shapes = [forward.shape for _, _, forward in requests]
        length = max(length for _, length in shapes)
        branches = [branch for _, _, forward in requests for branch in forward.branches]
        firsts = list(accumulate((num_rows for num_rows, _ in shapes), initial=0))
        starts = [
            [first * length + start for start in forward.starts(length)]
            for first, (_, _, forward) in zip(firsts, requests, strict=False)
        ]
        flat = [start for own in starts for start in own]
        cache = self._cache if cached else None
        if cache is not None:
            for row, _, forward in requests:
                if forward.keep is not None:
                    cache.compact(row, list(forward.keep))
        ids, positions, mask, source = _assemble(branches, flat, (firsts[-1], length), cached=cached)
        device = self._device
        if cache is not None:
            rows = [row for (row, _, _), (num_rows, _) in zip(requests, shapes, strict=True) for _ in range(num_rows)]
            owners = [row for row, _, forward in requests for _ in forward.branches]
            row_index, cache_index = _write_indices(branches, owners)
            source = None if source is None else to_device(source, device)
            cache.prepare(rows, mask.shape[2], source, to_device(row_index, device), to_device(cache_index, device))
        ids, positions, mask = (to_device(tensor, device) for tensor in (ids, positions, mask))
        hidden = self._model.hidden_states(ids, positions, mask, cache)
        self.num_calls += 1
        self.num_positions += ids.numel()
        results: list[list[Reading]] = []
        spans: list[Span] = []
        for i, (row, prompt_id, forward) in enumerate(requests):
            ahead: list[dict[int, int]] | None = [{} for _ in forward.branches] if self._reads_ahead else None
            results.append(add_spans(spans, forward.branches, forward.draw, prompt_id, starts[i], length, ahead=ahead))
            self._held[row] = _Held(hidden[firsts[i] : firsts[i + 1]], forward, ahead)
        self._reader.read(hidden.flatten(0, 1), spans)
        return results


def _assemble(
    branches: Sequence[Branch], starts: Sequence[int], shape: tuple[int, int], *, cached: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Lay branches out in a padded batch.

    Returns:
        Ids and positions; the mask [sequence, token, key] over cache entries or tokens; the branches' places in the
        batch laid end to end, ``None`` if they are all of it in order.
    """
    num_keys = shape[1]
    if cached:
        num_keys = max(max(b.write_at + len(b.tokens), *(stop for _, stop in b.visible), 0) for b in branches)
    tokens = np.array([token for branch in branches for token in branch.tokens])
    places = np.array([place for branch in branches for place in branch.positions])
    mask = np.zeros((*shape, num_keys), dtype=bool)
    for branch, start in zip(branches, starts, strict=True):
        n = len(branch.tokens)
        row, offset = divmod(start, shape[1])
        own = branch.write_at if cached else offset
        rows = mask[row, offset : offset + n]
        for begin, end in branch.visible:
            rows[:, begin:end] = True
        if branch.order is None:
            rows[:, own : own + n] = _triangle(n)
        else:
            order = np.asarray(branch.order)
            rows[:, own : own + n] = order[None, :] <= order[:, None]
    if len(tokens) == shape[0] * shape[1]:  # nothing is padded, and branches come in the order of their places
        ids, positions, source = tokens.reshape(shape), places.reshape(shape), None
    else:
        lengths = [len(branch.tokens) for branch in branches]
        source = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
        ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        ids.reshape(-1)[source], positions.reshape(-1)[source] = tokens, places
        is_padding = np.ones(shape, dtype=bool)
        is_padding.reshape(-1)[source] = False
        first_entries = np.zeros(shape[0], dtype=np.int64)
        for branch, start in zip(branches, starts, strict=True):
            if cached and start % shape[1] == 0:
                first_entries[start // shape[1]] = branch.write_at
        row, offset = is_padding.nonzero()
        mask[row, offset, first_entries[row]] = True  # padding must see something, or its softmax is NaN
        source = torch.from_numpy(source)
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(mask), source


@lru_cache(maxsize=256)
def _triangle(size: int) -> np.ndarray:
    """Return a causal mask; not to be changed."""
    return np.tri(size, dtype=bool)


def _write_indices(branches: Sequence[Branch], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return storage row and cache index of every token."""
    lengths = [len(branch.tokens) for branch in branches]
    ends = [branch.write_at + n for branch, n in zip(branches, lengths, strict=True)]
    follows = (branch.write_at == end for branch, end in zip(branches[1:], ends, strict=False))
    if rows.count(rows[0]) == len(rows) and all(follows):  # a prompt alone writes without a gap
        cache_index = np.arange(branches[0].write_at, ends[-1])
        return torch.from_numpy(np.full(len(cache_index), rows[0])), torch.from_numpy(cache_index)
    parts = [np.arange(branch.write_at, end) for branch, end in zip(branches, ends, strict=True)]
    return torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(np.concatenate(parts))
