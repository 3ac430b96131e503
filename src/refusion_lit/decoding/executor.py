"""Batches the forwards of many prompts into calls of the model, and counts them where they happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from refusion_lit.decoding.reading import Reader, Span
from refusion_lit.decoding.requests import Branch, Draw, Forward, MoreDrafts, Reading
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.noise import stable_key


@dataclass(slots=True)
class _Held:
    """Hidden states of a prompt's last forward, for further reads."""

    hidden: Tensor
    forward: Forward


class Executor:
    """Runs requests of several prompts together.

    Args:
        model: The model.
        num_rows: Prompts that are decoded at a time.
        all_probabilities: Read probabilities of all drafts, wanted or not (for traces).

    Attributes:
        num_calls: Calls of the model so far.
        num_positions: Token positions computed so far, padding included.
    """

    def __init__(self, model: LanguageModel, num_rows: int, *, all_probabilities: bool = False) -> None:
        self._model = model
        self._device = model.device
        self._cache = model.make_cache(num_rows)
        self._held: dict[int, _Held] = {}
        self._reader = Reader(model, all_probabilities=all_probabilities)
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
            length = held.hidden.shape[1]
            pairs = zip(held.forward.branches, request.draft_at, strict=True)
            branches = [_with_drafts(branch, at) for branch, at in pairs]
            starts = [base + start for start in held.forward.starts(length)]
            results.append(_spans(branches, request.draw, prompt_id, starts, length, spans))
            hidden.append(held.hidden.flatten(0, 1))
            base += held.hidden.shape[0] * length
        self._reader.read(torch.cat(hidden) if len(hidden) > 1 else hidden[0], spans)
        return results

    def release(self, row: int) -> None:
        """Forget what is held for a row whose prompt is done."""
        self._held.pop(row, None)

    def _call(self, requests: Sequence[tuple[int, str, Forward]], *, cached: bool) -> list[list[Reading]]:
        shapes = [forward.shape for _, _, forward in requests]
        length = max(length for _, length in shapes)
        branches = [branch for _, _, forward in requests for branch in forward.branches]
        firsts = np.cumsum([0, *(num_rows for num_rows, _ in shapes)]).tolist()
        starts = [
            [first * length + start for start in forward.starts(length)]
            for first, (_, _, forward) in zip(firsts, requests, strict=False)
        ]
        flat = [start for own in starts for start in own]
        cache = self._cache if cached else None
        if cache is not None:
            for row, _, forward in requests:
                if forward.keep is not None:
                    cache.keep(row, list(forward.keep))
        ids, positions, mask, source = _assemble(branches, flat, (firsts[-1], length), cached=cached)
        device = self._device
        if cache is not None:
            rows = [row for (row, _, _), (num_rows, _) in zip(requests, shapes, strict=True) for _ in range(num_rows)]
            owners = [row for row, _, forward in requests for _ in forward.branches]
            row_index, cache_index = _write_indices(branches, owners)
            source = None if source is None else source.to(device)
            cache.prepare(rows, mask.shape[2], source, row_index.to(device), cache_index.to(device))
        hidden = self._model.hidden_states(ids.to(device), positions.to(device), mask.to(device), cache)
        self.num_calls += 1
        self.num_positions += ids.numel()
        results: list[list[Reading]] = []
        spans: list[Span] = []
        for i, (row, prompt_id, forward) in enumerate(requests):
            self._held[row] = _Held(hidden[firsts[i] : firsts[i + 1]], forward)
            results.append(_spans(forward.branches, forward.draw, prompt_id, starts[i], length, spans))
        self._reader.read(hidden.flatten(0, 1), spans)
        return results


def _with_drafts(branch: Branch, draft_at: Sequence[int]) -> Branch:
    return Branch(tokens=branch.tokens, positions=branch.positions, draft_at=draft_at)


def _spans(
    branches: Sequence[Branch], how: Draw, prompt_id: str, starts: Sequence[int], length: int, spans: list[Span]
) -> list[Reading]:
    """Append the spans that branches read and return their still empty readings."""
    readings = [Reading() for _ in branches]
    sampling, guide = how.sampling, 0 if how.guidance is None else length
    for branch, reading, start in zip(branches, readings, starts, strict=True):
        if branch.draft_at:
            keys: list[int] = []
            if sampling.temperature > 0:
                keys = [
                    stable_key("draw", sampling.seed, prompt_id, how.round, branch.positions[offset] + how.shift)
                    for offset in branch.draft_at
                ]
            spans.append(Span(reading, how, [start + at for at in branch.draft_at], noise_keys=keys, guide=guide))
        if branch.score_at:
            offsets, given = zip(*branch.score_at, strict=True)
            spans.append(Span(reading, how, [start + at for at in offsets], given, guide=guide))
    return readings


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


def _write_indices(branches: Sequence[Branch], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return storage row and cache index of every token."""
    lengths = [len(branch.tokens) for branch in branches]
    cache_index = [np.arange(b.write_at, b.write_at + n) for b, n in zip(branches, lengths, strict=True)]
    return torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(np.concatenate(cache_index))
