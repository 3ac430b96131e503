"""Which prompt gets which row of the cache, and what it takes over from a prompt that begins alike.

Few-shot examples, system messages and instructions repeat. What two prompts have in common is computed for one of them,
and its keys and values are copied for the other. The rows of prompts in flight, and free ones as the last prompt left
them, serve as the store, so sharing takes no memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from refusion_lit.decoding.base import Decoder
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import Prompt

MIN_SHARED = 64
"""Fewest tokens worth sharing: a prompt may wait for a call until another one has computed them."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt that gets a row.

    Attributes:
        index: Its place among the prompts.
        prompt: The prompt.
        storage: Its row of the cache.
        source: The row to copy its first entries from, possibly the same; -1 if there are none.
        num_shared: Number of these entries.
    """

    index: int
    prompt: Prompt
    storage: int
    source: int
    num_shared: int


class Admission:
    """Prompts that wait for a row of the cache, and the prompts whose keys and values the rows hold.

    Args:
        prompts: The prompts with their places, admitted in order.
        num_rows: Rows of the cache.
        decoder: Says how much of a common beginning may be shared; ``None``: nothing is shared.
        held: What the rows hold from the call before.

    Attributes:
        held: Prompts whose entries are computed, by row; a finished prompt's stay until the row is used again.
    """

    def __init__(
        self,
        prompts: Iterable[tuple[int, Prompt]],
        num_rows: int,
        decoder: Decoder | None,
        held: Mapping[int, Tokens] | None = None,
    ) -> None:
        self._waiting, self._free, self._num_rows = deque(prompts), set(range(num_rows)), num_rows
        self._decoder, self.held = decoder, dict(held or {})
        self._pending: dict[int, Tokens] = {}  # prompts whose first forward is still to come, by row

    def __bool__(self) -> bool:
        """Return whether prompts wait."""
        return bool(self._waiting)

    def admit(self) -> Iterator[Admitted]:
        """Give free rows to prompts.

        A prompt that can soon share clearly more with one in flight waits for it; others may overtake, as far as a
        batch reaches.
        """
        delayed: list[tuple[int, Prompt]] = []
        while self._waiting and self._free and len(delayed) < self._num_rows:
            index, prompt = self._waiting.popleft()
            num_shared, source = self._longest(self.held, prompt.token_ids)
            if self._longest(self._pending, prompt.token_ids)[0] >= num_shared + MIN_SHARED:
                delayed.append((index, prompt))
                continue
            # The source itself, if it is free, saves the copy; else a row from which nobody can copy.
            storage = source if source in self._free else min(self._free, key=lambda row: (row in self.held, row))
            self._free.remove(storage)
            self.held.pop(storage, None)
            self._pending[storage] = prompt.token_ids
            yield Admitted(index, prompt, storage, source, num_shared)
        self._waiting.extendleft(reversed(delayed))

    def computed(self, storage: int) -> None:
        """Record that a row's first forward has run."""
        if storage in self._pending:
            self.held[storage] = self._pending.pop(storage)

    def release(self, storage: int) -> None:
        """Take back the row of a finished prompt."""
        self._free.add(storage)
        self._pending.pop(storage, None)  # of a prompt that ended without a forward

    def _longest(self, prompts: Mapping[int, Tokens], tokens: Tokens) -> tuple[int, int]:
        """Return how many tokens may be shared with one of the prompts, and its row; 0 and -1 if too few."""
        if self._decoder is None:
            return 0, -1
        best, row = 0, -1
        head = tokens[:MIN_SHARED]
        for storage, other in prompts.items():
            if other[:MIN_SHARED] == head:
                length = self._decoder.num_shareable(len(tokens), common_length(tokens, other))
                if length > best:
                    best, row = length, storage
        return (best, row) if best >= MIN_SHARED else (0, -1)


@dataclass
class KeptCache:
    """The cache of a call, kept for the next one: a conversation's turns begin with the turns before them.

    The next call must be for the same model with the same weights. Keeps as much memory as the last call needed.
    """

    _content: tuple[KVCache, Decoder, Mapping[int, Tokens], object] | None = None

    def take(self, decoder: Decoder, num_rows: int) -> tuple[KVCache | None, Mapping[int, Tokens]]:
        """Return the cache and the prompts that it holds, if the same decoder filled as many rows in the same mode.

        They are gone then: a call that is interrupted leaves a cache that holds nobody knows what.
        """
        content, self._content = self._content, None
        if content is None or content[1] != decoder or content[0].num_rows != num_rows or content[3] != _mode():
            return None, {}
        return content[0], content[2]

    def put(self, cache: KVCache, decoder: Decoder, held: Mapping[int, Tokens]) -> None:
        """Keep a cache with what its rows hold."""
        self._content = cache, decoder, held, _mode()


def _mode() -> object:
    """Return the modes of torch that a cache's tensors depend on: inference tensors, and autocast's types."""
    kinds = ("cpu", "cuda")
    autocast = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]
    return torch.is_inference_mode_enabled(), autocast


def common_length(first: Tokens, second: Tokens) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # by bisection: slices are compared far faster than tokens
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def groups_within(
    prompts: Sequence[Prompt], max_new_tokens: int, num_rows: int, max_cache_tokens: int | None
) -> list[tuple[int, list[tuple[int, Prompt]]]]:
    """Group prompts by how many of them the cache may hold at a time.

    All rows of a cache are as long as the longest, so long prompts run apart, fewer at a time.

    Args:
        prompts: The prompts.
        max_new_tokens: Room for each answer.
        num_rows: Rows at most.
        max_cache_tokens: Entries of all rows together, at most, enough for the longest prompt and its answer; ``None``:
            no bound.

    Returns:
        Numbers of rows, descending, and the prompts with their places that run with so many.
    """
    if max_cache_tokens is None or not prompts:
        return [(num_rows, list(enumerate(prompts)))]
    groups: dict[int, list[tuple[int, Prompt]]] = {}
    for index, prompt in enumerate(prompts):
        length = len(prompt.token_ids) + prompt.num_uncounted + max_new_tokens
        fitting = max_cache_tokens // length
        fitting = num_rows if fitting >= num_rows else 1 << (fitting.bit_length() - 1)  # few groups
        groups.setdefault(fitting, []).append((index, prompt))
    return sorted(groups.items(), reverse=True)
