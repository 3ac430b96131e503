"""Admission and prefix sharing: assigns rows of the cache to prompts, and reuses KV cache entries of common prefixes.

Few-shot examples, system messages and instructions repeat. The common prefix of two prompts is computed for one of
them, and its KV cache entries are copied for the other. Rows of prompts in flight and rows of finished prompts serve as
the store, so sharing takes no extra memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from refusion_lit.engine.decoder import Decoder
from refusion_lit.engine.row import Row
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import Prompt

MIN_SHARED = 64
"""Minimum number of tokens to share; shorter prefixes are recomputed: waiting one forward for them costs more."""

Tokens = tuple[int, ...]


class Admission:
    """Prompts that wait for a row of the cache, and the prompts whose KV cache entries the rows hold.

    Args:
        num_rows: Rows of the cache.
        decoder: Determines how much of a common prefix may be shared; ``None``: nothing is shared.
        held: Prompts whose entries the rows hold from an earlier engine, by row.

    Attributes:
        held: Prompts whose entries are computed, by row. Entries of a finished prompt stay until its row is reused.
    """

    def __init__(self, num_rows: int, decoder: Decoder | None, held: Mapping[int, Tokens] | None = None) -> None:
        self._waiting: deque[Row] = deque()
        self._free = set(range(num_rows))
        self._num_rows = num_rows
        self._decoder = decoder
        self.held = dict(held or {})
        self._pending: dict[int, Tokens] = {}  # prompts whose first forward is still to come, by row

    def add(self, waiting: Row) -> None:
        """Append a prompt to the queue."""
        self._waiting.append(waiting)

    def remove(self, index: int) -> None:
        """Take a prompt out of the queue, if it waits."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting.index != index)

    def __bool__(self) -> bool:
        """Return whether prompts wait."""
        return bool(self._waiting)

    def admit(self) -> Iterator[Row]:
        """Assign free rows to waiting prompts.

        A prompt is held back if a prompt in flight will soon have a prefix to share that is at least ``MIN_SHARED``
        tokens longer than any cached one. Later prompts may go first; at most ``num_rows`` prompts are held back.
        """
        delayed: list[Row] = []
        while self._waiting and self._free and len(delayed) < self._num_rows:
            waiting = self._waiting.popleft()
            tokens = waiting.prompt.token_ids
            waiting.num_shared, waiting.source = self._longest(self.held, tokens)
            if self._longest(self._pending, tokens)[0] >= waiting.num_shared + MIN_SHARED:
                delayed.append(waiting)
                continue
            # A free source row needs no copy. Otherwise prefer a row that holds no prompt, to keep sources for others.
            is_free = waiting.source in self._free
            storage = waiting.source if is_free else min(self._free, key=lambda row: (row in self.held, row))
            self._free.remove(storage)
            self.held.pop(storage, None)
            self._pending[storage] = tokens
            waiting.storage = storage
            yield waiting
        self._waiting.extendleft(reversed(delayed))

    def computed(self, storage: int) -> None:
        """Record that a row's first forward has run."""
        if storage in self._pending:
            self.held[storage] = self._pending.pop(storage)

    def release(self, storage: int) -> None:
        """Take back the row of a finished prompt."""
        self._free.add(storage)
        self._pending.pop(storage, None)  # pending still if the prompt ended without a forward

    def _longest(self, prompts: Mapping[int, Tokens], tokens: Tokens) -> tuple[int, int]:
        """Return the largest number of tokens to share with one of the prompts, and its row; 0 and -1 if too few."""
        if self._decoder is None:
            return 0, -1
        best = 0
        row = -1
        head = tokens[:MIN_SHARED]
        for storage, other in prompts.items():
            if other[:MIN_SHARED] == head:
                length = self._decoder.num_shareable(len(tokens), common_length(tokens, other))
                if length > best:
                    best = length
                    row = storage
        return (best, row) if best >= MIN_SHARED else (0, -1)


@dataclass
class KeptCache:
    """Keeps the cache of one call for the next: each turn of a conversation shares its prefix with the turns before.

    The next call must use the same model with the same weights. The memory of the last call's cache stays allocated.
    """

    _content: tuple[KVCache, Decoder, Mapping[int, Tokens], object] | None = None

    def take(self, decoder: Decoder, num_rows: int) -> tuple[KVCache | None, Mapping[int, Tokens]]:
        """Remove and return the kept cache and its prompts; ``None`` and an empty mapping if it is unusable.

        It is usable if it has ``num_rows`` rows and was filled by the same decoder in the same torch modes. It is
        removed because an interrupted call leaves its entries undefined.
        """
        content = self._content
        self._content = None
        if content is None or content[1] != decoder or content[0].num_rows != num_rows or content[3] != _mode():
            return None, {}
        return content[0], content[2]

    def put(self, cache: KVCache, decoder: Decoder, held: Mapping[int, Tokens]) -> None:
        """Keep a cache and the prompts that its rows hold."""
        self._content = cache, decoder, held, _mode()


def _mode() -> object:
    """Return the types of autocast, which a cache's tensors depend on."""
    kinds = ("cpu", "cuda")
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]


def common_length(first: Tokens, second: Tokens) -> int:
    """Return the length of the longest common prefix."""
    low = 0
    high = min(len(first), len(second))
    while low < high:  # bisection: comparing slices is far faster than comparing tokens one by one
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def groups_within(
    prompts: Sequence[Prompt], max_new_tokens: int, num_rows: int, max_cache_tokens: int | None
) -> list[tuple[int, list[tuple[int, Prompt]]]]:
    """Group prompts by the number of rows that fit into a bounded cache.

    All rows of a cache have the length of the longest one. Long prompts therefore form groups of their own with fewer
    rows.

    Args:
        prompts: The prompts.
        max_new_tokens: Room for each response.
        num_rows: Maximum number of rows.
        max_cache_tokens: Maximum number of entries of all rows together; must hold the longest prompt and its response.
            ``None``: no bound.

    Returns:
        Pairs of a number of rows, in descending order, and the prompts (with their places) that run with it.
    """
    if max_cache_tokens is None or not prompts:
        return [(num_rows, list(enumerate(prompts)))]
    groups: dict[int, list[tuple[int, Prompt]]] = {}
    for index, prompt in enumerate(prompts):
        length = len(prompt.token_ids) + prompt.num_uncounted + max_new_tokens
        fitting = max_cache_tokens // length
        fitting = num_rows if fitting >= num_rows else 1 << (fitting.bit_length() - 1)  # for few groups
        groups.setdefault(fitting, []).append((index, prompt))
    return sorted(groups.items(), reverse=True)
