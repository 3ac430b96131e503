"""Batches the forwards of many prompts into calls of the model, and counts them where they happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from refusion_lit.decoding.requests import Branch, Draw, Forward, MoreDrafts, Reading
from refusion_lit.decoding.sampling import draw
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.noise import stable_key

_MAX_LOGITS = 1 << 26
"""Logits held at a time (256 MB in float32); more places are read in chunks."""


@dataclass(slots=True)
class _Held:
    """Hidden states of a prompt's last forward, for further reads."""

    hidden: Tensor
    forward: Forward


@dataclass(slots=True)
class _Place:
    """One place whose logits are read: where in the batch, for whom, and what for."""

    hidden_index: int
    reading: Reading
    draw: Draw
    noise_key: int
    target: int | None
    guided_by: int | None


class Executor:
    """Runs requests of several prompts together.

    Attributes:
        num_calls: Calls of the model so far.
        num_positions: Token positions computed so far, padding included.
    """

    def __init__(self, model: LanguageModel, num_rows: int) -> None:
        self._model = model
        self._cache = model.make_cache(num_rows)
        self._held: dict[int, _Held] = {}
        self._banned = _banned_ids(model)
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
        places: list[_Place] = []
        results: list[list[Reading]] = []
        hidden: list[Tensor] = []
        base = 0
        for row, prompt_id, request in requests:
            held = self._held[row]
            length = held.hidden.shape[1]
            pairs = zip(held.forward.branches, request.draft_at, strict=True)
            branches = [_with_drafts(branch, at) for branch, at in pairs]
            starts = [base + start for start in held.forward.starts(length)]
            results.append(_places(branches, request.draw, prompt_id, starts, length, places))
            hidden.append(held.hidden.flatten(0, 1))
            base += held.hidden.shape[0] * length
        self._read(torch.cat(hidden) if len(hidden) > 1 else hidden[0], places)
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
        ids, positions, mask = _assemble(branches, flat, (firsts[-1], length), cached=cached)
        device = self._model.device
        if cache is not None:
            rows = [row for (row, _, _), (num_rows, _) in zip(requests, shapes, strict=True) for _ in range(num_rows)]
            owners = [row for row, _, forward in requests for _ in forward.branches]
            source, row_index, cache_index = _write_indices(branches, flat, owners)
            cache.prepare(rows, mask.shape[2], source.to(device), row_index.to(device), cache_index.to(device))
        hidden = self._model.hidden_states(ids.to(device), positions.to(device), mask.to(device), cache)
        self.num_calls += 1
        self.num_positions += ids.numel()
        results: list[list[Reading]] = []
        places: list[_Place] = []
        for i, (row, prompt_id, forward) in enumerate(requests):
            self._held[row] = _Held(hidden[firsts[i] : firsts[i + 1]], forward)
            results.append(_places(forward.branches, forward.draw, prompt_id, starts[i], length, places))
        self._read(hidden.flatten(0, 1), places)
        return results

    def _read(self, hidden: Tensor, places: list[_Place]) -> None:
        """Fill the readings of ``places``: the only point of a forward where device and host meet."""
        if not places:
            return
        by_draw: dict[tuple[object, ...], list[_Place]] = {}
        for place in places:
            d = place.draw
            key = (d.sampling.temperature, d.sampling.top_p, d.sampling.top_k, d.forbidden, d.guidance,
                   d.confidence_forbidden, d.statistics)  # fmt: skip
            by_draw.setdefault(key, []).append(place)
        step = max(1, _MAX_LOGITS // self._head_rows)
        for group in by_draw.values():
            for start in range(0, len(group), step):
                self._read_group(hidden, group[start : start + step])

    @property
    def _head_rows(self) -> int:
        return max(self._model.special_tokens.vocab_size, 1)

    def _read_group(self, hidden: Tensor, places: list[_Place]) -> None:
        how = places[0].draw
        device = hidden.device
        drafts, scored = ([p for p in places if (p.target is None) is drawn] for drawn in (True, False))
        places = drafts + scored
        logits = self._logits(hidden, [place.hidden_index for place in places])
        if how.guidance is not None:
            unconditional = self._logits(hidden, [place.guided_by or 0 for place in places])
            logits = _finite(unconditional + (how.guidance + 1.0) * (logits - unconditional))
        tokens = torch.tensor([place.target for place in scored], dtype=torch.long, device=device)
        statistics: list[Tensor] = []
        if drafts:  # where a token is given, none is drawn
            keys = None
            if how.sampling.temperature > 0:
                keys = torch.tensor([place.noise_key for place in drafts], device=device)
            drawn = draw(self._without(logits[: len(drafts)], how.forbidden), how.sampling, keys)
            statistics = _statistics(how.statistics, drawn.filtered, drawn.tokens)
            tokens = torch.cat([drawn.tokens, tokens])
        if how.confidence_forbidden:
            logits = logits.clone()
            logits[:, list(how.confidence_forbidden)] = -math.inf
        probability = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        found = torch.stack([tokens.double(), probability.double()], -1).tolist()
        for place, (token, value) in zip(places, found, strict=True):
            if place.target is not None:
                place.reading.scores.append(value)
                continue
            place.reading.tokens.append(int(token))
            place.reading.probabilities.append(value)
        for name, values in zip(how.statistics, statistics, strict=False):
            for place, value in zip(drafts, values.tolist(), strict=True):
                place.reading.statistics.setdefault(name, []).append(value)

    def _logits(self, hidden: Tensor, index: list[int]) -> Tensor:
        """Logits in float32 or better."""
        logits = self._model.logits(hidden[torch.tensor(index, device=hidden.device)])
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return _finite(logits)

    def _without(self, logits: Tensor, forbidden: tuple[int, ...]) -> Tensor:
        if self._banned.numel() < logits.shape[-1]:
            banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            banned[: self._banned.numel()] = self._banned.to(logits.device)
            banned[self._model.special_tokens.vocab_size :] = True
            self._banned = banned
        allowed = logits.masked_fill(self._banned, -math.inf)
        if forbidden:
            allowed[:, list(forbidden)] = -math.inf
        return allowed


def _finite(logits: Tensor) -> Tensor:
    """Make logits finite, not-a-number counting as impossible: -inf is kept for ids that are left out of a choice."""
    lowest, highest = torch.finfo(logits.dtype).min, torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=lowest, posinf=highest, neginf=lowest)


def _banned_ids(model: LanguageModel) -> Tensor:
    banned = torch.zeros(model.special_tokens.vocab_size, dtype=torch.bool)
    banned[list(model.special_tokens.banned_token_ids)] = True
    return banned


def _with_drafts(branch: Branch, draft_at: Sequence[int]) -> Branch:
    return Branch(tokens=branch.tokens, positions=branch.positions, draft_at=draft_at)


def _places(
    branches: Sequence[Branch], how: Draw, prompt_id: str, starts: Sequence[int], length: int, places: list[_Place]
) -> list[Reading]:
    """Append the places that branches read and return their still empty readings."""
    readings = [Reading() for _ in branches]
    seed = how.sampling.seed
    for branch, reading, start in zip(branches, readings, starts, strict=True):
        guided_by = None if how.guidance is None else length
        for offset in branch.draft_at:
            key = 0
            if how.sampling.temperature > 0:
                key = stable_key("draw", seed, prompt_id, how.round, branch.positions[offset] + how.shift)
            other = None if guided_by is None else start + offset + guided_by
            places.append(_Place(start + offset, reading, how, key, None, other))
        for offset, token in branch.score_at:
            other = None if guided_by is None else start + offset + guided_by
            places.append(_Place(start + offset, reading, how, 0, token, other))
    return readings


def _assemble(
    branches: Sequence[Branch], starts: Sequence[int], shape: tuple[int, int], *, cached: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay branches out in a padded batch and build its mask [sequence, token, key] over cache entries or tokens."""
    num_keys = shape[1]
    if cached:
        num_keys = max(max(b.write_at + len(b.tokens), *(stop for _, stop in b.visible), 0) for b in branches)
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    mask = np.zeros((*shape, num_keys), dtype=bool)
    is_padding, first_entries = np.ones(shape, dtype=bool), np.zeros(shape[0], dtype=np.int64)
    for branch, start in zip(branches, starts, strict=True):
        n = len(branch.tokens)
        row, offset = divmod(start, shape[1])
        at = slice(offset, offset + n)
        ids[row, at] = branch.tokens
        positions[row, at] = branch.positions
        is_padding[row, at] = False
        for begin, end in branch.visible:
            mask[row, at, begin:end] = True
        own = slice(branch.write_at, branch.write_at + n) if cached else at
        if branch.order is None:
            mask[row, at, own] = np.tri(n, dtype=bool)
        else:
            order = np.asarray(branch.order)
            mask[row, at, own] = order[None, :] <= order[:, None]
        if offset == 0:
            first_entries[row] = own.start
    row, offset = is_padding.nonzero()
    mask[row, offset, first_entries[row]] = True  # padding must see something, or its softmax is NaN
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(mask)


def _write_indices(
    branches: Sequence[Branch], starts: Sequence[int], rows: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = [len(b.tokens) for b in branches]
    source = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    cache_index = np.concatenate([b.write_at + np.arange(n) for b, n in zip(branches, lengths, strict=True)])
    return torch.from_numpy(source), torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(cache_index)


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
