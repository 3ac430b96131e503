"""The KV cache: storage by row and index, growth, and compaction, against a full recomputation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.modeling import kv_cache
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.transformers_forward import LibraryCache
from support.fakes import VOCAB, tiny_backbone

# Norms and rotary angles are computed in float32 even in a float64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def write_plan(entries: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return source, row and cache indices as tensors."""
    source, row, index = zip(*entries, strict=True)
    return torch.tensor(source), torch.tensor(row), torch.tensor(index)


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), num_rows=st.integers(1, 3))
def test_storage_is_a_table_of_rows_and_indices(seed: int, num_rows: int) -> None:
    """A table in Python repeats what the cache does: keys are numbers, and each value is its key plus a half."""
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "CHUNK", 4)
        cache = KVCache(1, num_rows, capacity=2)
        table: Table = {}
        numbers = count()
        for _ in range(12):
            if table and chance.random() < 0.4:
                table = compact_a_row(cache, table, num_rows, chance)
            else:
                store_and_compare(cache, table, num_rows, numbers, chance)


Table = dict[tuple[int, int], int]
"""Stored keys, by row and index."""


def compact_a_row(cache: KVCache, table: Table, num_rows: int, chance: random.Random) -> Table:
    """Keep a random selection of a row's entries, in any order; return the new table."""
    row = chance.randrange(num_rows)
    stored = [index for table_row, index in table if table_row == row]
    kept = chance.sample(stored, chance.randint(0, len(stored)))
    cache.compact(row, kept)
    moved = {(row, place): table[row, index] for place, index in enumerate(kept)}
    return {key: value for key, value in table.items() if key[0] != row} | moved


def store_and_compare(
    cache: KVCache, table: Table, num_rows: int, numbers: Iterator[int], chance: random.Random
) -> None:
    """Store some tokens of a random batch at random indices; compare what the batch's rows see with the table."""
    length, num_keys = chance.randint(1, 4), chance.randint(4, 15)
    rows = [chance.randrange(num_rows) for _ in range(chance.randint(1, 3))]
    places = [(row, index) for row in sorted(set(rows)) for index in range(num_keys)]
    num_tokens = len(rows) * length
    sources = chance.sample(range(num_tokens), chance.randint(1, min(num_tokens, len(places))))
    targets = chance.sample(places, len(sources))
    tokens = [next(numbers) for _ in range(num_tokens)]
    plan = [(source, row, index) for source, (row, index) in zip(sources, targets, strict=True)]
    cache.prepare(rows, num_keys, *write_plan(plan))
    states = torch.tensor(tokens).view(len(rows), 1, length, 1).float()
    keys, values = LibraryCache(cache).update(states, states + 0.5, 0)
    table.update({(row, index): tokens[source] for source, row, index in plan})
    assert keys.shape == (len(rows), 1, num_keys, 1)
    assert torch.equal(values[values != 0], keys[values != 0] + 0.5)
    for sequence, row in enumerate(rows):
        for index in range(num_keys):
            if (row, index) in table:
                assert keys[sequence, 0, index, 0] == table[row, index]


@dataclass
class Recomputed:
    """What a row's cache should hold: tokens, their positions, and the entries that every token has seen."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sees: list[set[int]] = field(default_factory=list)

    def hidden(self, model: Backbone, tokens: list[int], positions: list[int], mask: Tensor) -> Tensor:
        """Recompute everything without a cache; ``mask`` [new, old + new] says what the new tokens see."""
        num_old, total = len(self.tokens), len(self.tokens) + len(tokens)
        whole = torch.zeros(total, total, dtype=torch.bool)
        for query, seen in enumerate(self.sees):
            whole[query, sorted(seen)] = True
        whole[num_old:] = mask
        ids, places = torch.tensor([self.tokens + tokens]), torch.tensor([self.positions + positions])
        return model.hidden_states(ids, places, whole[None])[0, num_old:]

    def extend(self, tokens: list[int], positions: list[int], mask: Tensor) -> None:
        for token, position, seen in zip(tokens, positions, mask, strict=True):
            self.tokens.append(token)
            self.positions.append(position)
            self.sees.append(set(seen.nonzero().flatten().tolist()))

    def keep(self, indices: list[int]) -> None:
        """Keep some entries, which have seen only entries that are kept."""
        place = {index: i for i, index in enumerate(indices)}
        self.tokens = [self.tokens[i] for i in indices]
        self.positions = [self.positions[i] for i in indices]
        self.sees = [{place[j] for j in self.sees[i]} for i in indices]


@dataclass
class NewTokens:
    """A branch: tokens that follow the entries of a row, and see some of the entries and one another causally.

    Attributes:
        row: The row of the cache.
        branch: Number of the branch among the row's branches.
        tokens: The tokens.
        positions: The tokens' positions.
        mask: What the tokens see (token, old entry or token).
        first: Index in the cache at which the first token is stored.
    """

    row: int
    branch: int
    tokens: list[int]
    positions: list[int]
    mask: Tensor
    first: int


def draw_tokens(chance: random.Random, row: int, branch: int, num_old: int, max_length: int) -> NewTokens:
    num = chance.randint(1, max_length)
    tokens = [chance.randrange(VOCAB) for _ in range(num)]
    positions = [chance.randrange(200) for _ in range(num)]
    mask = torch.zeros(num, num_old + num, dtype=torch.bool)
    mask[:, :num_old] = torch.rand(num_old, generator=torch.Generator().manual_seed(branch)) < 0.8
    mask[:, num_old:] = torch.ones(num, num, dtype=torch.bool).tril()
    return NewTokens(row, branch, tokens, positions, mask, num_old + branch * max_length)


def feed(model: Backbone, cache: KVCache, branches: list[NewTokens], length: int, num_keys: int) -> Tensor:
    """Compute branches as a padded batch over the cache; return hidden states (branch, token, dim)."""
    ids, positions = (torch.zeros(len(branches), length, dtype=torch.long) for _ in range(2))
    mask = torch.zeros(len(branches), length, num_keys, dtype=torch.bool)
    plan = []
    for sequence, new in enumerate(branches):
        num = len(new.tokens)
        num_old = new.mask.shape[1] - num
        ids[sequence, :num], positions[sequence, :num] = torch.tensor(new.tokens), torch.tensor(new.positions)
        mask[sequence, :num, :num_old] = new.mask[:, :num_old]
        mask[sequence, :num, new.first : new.first + num] = new.mask[:, num_old:]
        mask[sequence, num:, new.first] = True  # padding sees a key, because a query without keys gives NaN
        plan += [(sequence * length + i, new.row, new.first + i) for i in range(num)]
    cache.prepare([new.row for new in branches], num_keys, *write_plan(plan))
    return model.hidden_states(ids, positions, mask, cache)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_cached_states_are_those_of_a_full_recomputation(seed: int) -> None:
    """Branches share a context, entries are dropped and moved, rows differ in length, and the storage grows."""
    chance = random.Random(seed)
    model, num_rows = tiny_backbone(), 3
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kv_cache, "CHUNK", 8)
        cache = KVCache(2, num_rows, capacity=4)
        contents = [Recomputed() for _ in range(num_rows)]
        for _ in range(12):
            rows = chance.sample(range(num_rows), chance.randint(1, num_rows))
            max_length = chance.randint(1, 5)
            branches = [
                draw_tokens(chance, row, branch, len(contents[row].tokens), max_length)
                for row in rows
                for branch in range(chance.randint(1, 3))
            ]
            num_keys = max(len(contents[row].tokens) for row in rows) + 3 * max_length
            hidden = feed(model, cache, branches, max_length, num_keys)
            for new, states in zip(branches, hidden, strict=True):
                expected = contents[new.row].hidden(model, new.tokens, new.positions, new.mask)
                torch.testing.assert_close(states[: len(new.tokens)], expected, **CLOSE)
            for new in branches:
                if new.branch == 0:  # the next tokens of a row overwrite its other branches
                    contents[new.row].extend(new.tokens, new.positions, new.mask)
            for row in range(num_rows):
                if chance.random() < 0.5:
                    kept = choose_closed(contents[row], chance)
                    cache.compact(row, kept)
                    contents[row].keep(kept)
        assert cache.capacity > 8


def choose_closed(known: Recomputed, chance: random.Random) -> list[int]:
    """Choose entries with all that they have seen, in any order."""
    chosen = {index for index in range(len(known.tokens)) if chance.random() < 0.5}
    for index in range(len(known.tokens) - 1, -1, -1):  # entries have only seen earlier ones
        if index in chosen:
            chosen |= known.sees[index]
    order = sorted(chosen)
    chance.shuffle(order)
    return order


def test_storage_grows_by_chunks_and_keeps_what_it_holds() -> None:
    model = tiny_backbone()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (1, 300), generator=generator)
    positions = torch.arange(300)[None].flip(1) % 250
    causal = torch.ones(1, 300, 300, dtype=torch.bool).tril()
    cache = KVCache(2, 2)
    with torch.no_grad():
        whole = model.hidden_states(ids, positions, causal)
        capacities = []
        for start in range(0, 300, 50):
            stop = start + 50
            cache.prepare([1], stop, torch.arange(50), torch.ones(50, dtype=torch.long), torch.arange(start, stop))
            part = model.hidden_states(
                ids[:, start:stop], positions[:, start:stop], causal[:, start:stop, :stop], cache
            )  # fmt: skip
            torch.testing.assert_close(part, whole[:, start:stop], **CLOSE)
            capacities.append(cache.capacity)
    # The chunks have 128 entries; the text has 50, 100, 150, 200, 250 and 300 tokens.
    assert capacities == [128, 128, 256, 256, 256, 384]


def test_a_leading_run_that_is_in_place_is_not_moved() -> None:
    cache = KVCache(1, 1, capacity=8)
    states = torch.arange(6.0).view(1, 1, 6, 1)
    entries = states[0].transpose(0, 1)
    cache.prepare([0], 6, torch.arange(6), torch.zeros(6, dtype=torch.long), torch.arange(6))
    stored_keys, _ = cache.store(0, entries, entries)
    cache.compact(0, [0, 1, 2])
    cache.compact(0, [4, 3], num_leading=2)
    assert stored_keys[0, :6, 0, 0].tolist() == [0, 1, 4, 3, 4, 5]
    assert cache.store(0, entries, entries)[0] is stored_keys


def test_an_unused_cache_can_grow_and_compact() -> None:
    cache = KVCache(2, 1, capacity=2)
    cache.compact(0, [1, 0])
    cache.prepare([0], 300, torch.tensor([0]), torch.tensor([0]), torch.tensor([299]))
    states = torch.ones(1, 2, 1, 4)
    keys, _ = LibraryCache(cache).update(states, states, 1)
    assert keys.shape == (1, 2, 300, 4)
    assert keys[0, :, 299].sum() == 8


def test_nothing_is_derived_from_a_length() -> None:
    cache = KVCache(1, 1)
    cache.prepare([0], 3, torch.arange(3), torch.zeros(3, dtype=torch.long), torch.arange(3))
    LibraryCache(cache).update(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1), 0)
    assert LibraryCache(cache).get_seq_length() == 0


def test_a_forward_needs_a_prepared_cache() -> None:
    cache = KVCache(1, 1)
    with pytest.raises(AttributeError, match="source_index"):
        LibraryCache(cache).update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
