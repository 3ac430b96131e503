"""Which prompt gets which row of the cache, and what it takes over from a prompt that begins alike.

Few-shot examples, system messages and instructions repeat. What two prompts have in common is computed for one of them,
and its keys and values are copied for the other. The rows of prompts in flight, and free ones as the last prompt left
them, serve as the store, so sharing takes no memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
        source: The row to copy its first entries from; may be the same.
        num_shared: Number of these entries.
    """

    index: int
    prompt: Prompt
    storage: int
    source: int
    num_shared: int


class Admission:
    """Prompts that wait for a row.

    Args:
        prompts: The prompts with their places, admitted in order.
        num_rows: Rows of the cache.
        prefixes: What rows hold; ``None``: nothing is shared.
    """

    def __init__(self, prompts: Iterable[tuple[int, Prompt]], num_rows: int, prefixes: SharedPrefixes | None) -> None:
        self._waiting, self._free = deque(prompts), list(range(num_rows))
        self._num_rows, self._prefixes = num_rows, prefixes

    def __bool__(self) -> bool:
        """Return whether prompts wait."""
        return bool(self._waiting)

    def admit(self) -> Iterator[Admitted]:
        """Give free rows to prompts.

        A prompt that can soon share with one in flight waits for it; others may overtake, as far as a batch reaches.
        """
        delayed: list[tuple[int, Prompt]] = []
        while self._waiting and self._free and len(delayed) < self._num_rows:
            index, prompt = self._waiting.popleft()
            if self._prefixes is None:
                storage = self._free.pop(0)
                yield Admitted(index, prompt, storage, storage, 0)
            elif self._prefixes.is_imminent(prompt.token_ids):
                delayed.append((index, prompt))
            else:
                storage, source, length = self._prefixes.admit(prompt.token_ids, self._free)
                self._free.remove(storage)
                yield Admitted(index, prompt, storage, source, length)
        self._waiting.extendleft(reversed(delayed))

    def computed(self, storage: int) -> None:
        """Record that a row's prompt is stored."""
        if self._prefixes is not None:
            self._prefixes.computed(storage)

    def release(self, storage: int) -> None:
        """Take back the row of a finished prompt."""
        self._free = sorted([*self._free, storage])
        if self._prefixes is not None:
            self._prefixes.pending.pop(storage, None)  # of a prompt that ended without a forward


@dataclass
class KeptCache:
    """The cache of a call, kept for the next one: a conversation's turns begin with the turns before them.

    The next call must be for the same model with the same weights. Keeps as much memory as the last call needed.
    """

    _cache: KVCache | None = None
    _prefixes: SharedPrefixes | None = None

    def take(self, decoder: Decoder, num_rows: int) -> tuple[KVCache | None, dict[int, Tokens]]:
        """Return the cache and the prompts that it holds, if the same decoder filled as many rows.

        They are gone then: a call that is interrupted leaves a cache that holds nobody knows what.
        """
        cache, prefixes = self._cache, self._prefixes
        self._cache = self._prefixes = None
        if cache is None or prefixes is None or prefixes.decoder != decoder or cache.num_rows != num_rows:
            return None, {}
        return cache, prefixes.held

    def put(self, cache: KVCache | None, prefixes: SharedPrefixes | None) -> None:
        """Keep a cache, unless nothing of it can be shared."""
        self._cache, self._prefixes = cache, prefixes


@dataclass
class SharedPrefixes:
    """Which rows of the cache begin with the keys and values of which prompts.

    Args:
        decoder: Says how much of a common beginning may be shared.

    Attributes:
        held: Prompts whose entries are computed, by storage row; a finished prompt's stay until the row is used again.
        pending: Prompts whose first forward is still to come, by storage row.
    """

    decoder: Decoder
    held: dict[int, Tokens] = field(default_factory=dict)
    pending: dict[int, Tokens] = field(default_factory=dict)

    def is_imminent(self, tokens: Tokens) -> bool:
        """Return whether a pending prompt will share clearly more with a prompt than any held one does now."""
        soon, _ = self._longest(self.pending, tokens)
        return soon >= MIN_SHARED and soon >= self._longest(self.held, tokens)[0] + MIN_SHARED

    def admit(self, tokens: Tokens, free: Collection[int]) -> tuple[int, int, int]:
        """Choose a free storage row for a prompt and the row that it shares with.

        Returns:
            Its storage row, the row to copy from (possibly the same), and the number of tokens to copy.
        """
        length, source = self._longest(self.held, tokens)
        # The source itself, if it is free, saves the copy; else a row from which nobody can copy.
        is_free = length > 0 and source in free
        storage = source if is_free else min(free, key=lambda row: (row in self.held, row))
        self.held.pop(storage, None)
        self.pending[storage] = tokens
        return storage, source if length else storage, length

    def computed(self, storage: int) -> None:
        """Record that a row's first forward has run."""
        if storage in self.pending:
            self.held[storage] = self.pending.pop(storage)

    def _longest(self, prompts: Mapping[int, Tokens], tokens: Tokens) -> tuple[int, int]:
        """Return how many tokens may be shared with one of the prompts, and which; 0 if too few."""
        best, row = 0, -1
        head = tokens[:MIN_SHARED]
        for storage, other in prompts.items():
            if other[:MIN_SHARED] == head:
                length = self.decoder.num_shareable(len(tokens), common_length(tokens, other))
                if length > best:
                    best, row = length, storage
        return (best, row) if best >= MIN_SHARED else (0, -1)


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
        length = len(prompt.token_ids) + max_new_tokens
        fitting = max_cache_tokens // length
        fitting = num_rows if fitting >= num_rows else 1 << (fitting.bit_length() - 1)  # few groups
        groups.setdefault(fitting, []).append((index, prompt))
    return sorted(groups.items(), reverse=True)
