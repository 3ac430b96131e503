"""The KV cache: storage by row and index, growth, and compaction, against a full recomputation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

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
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "CHUNK", 4)
        cache = KVCache(1, num_rows, capacity=2)
        table: dict[tuple[int, int], int] = {}
        number = 0
        for _ in range(12):
            if table and chance.random() < 0.4:
                row = chance.randrange(num_rows)
                stored = [index for r, index in table if r == row]
                kept = chance.sample(stored, chance.randint(0, len(stored)))
                cache.compact(row, kept)
                moved = {(row, place): table[row, index] for place, index in enumerate(kept)}
                table = {key: value for key, value in table.items() if key[0] != row} | moved
                continue
            length, num_keys = chance.randint(1, 4), chance.randint(4, 15)
            rows = [chance.randrange(num_rows) for _ in range(chance.randint(1, 3))]
            places = [(row, index) for row in sorted(set(rows)) for index in range(num_keys)]
            sources = chance.sample(range(len(rows) * length), chance.randint(1, min(len(rows) * length, len(places))))
            targets = chance.sample(places, len(sources))
            states = torch.arange(number, number + len(rows) * length).view(len(rows), 1, length, 1).float()
            number += len(rows) * length
            cache.prepare(
                rows, num_keys, *write_plan([(s, r, i) for s, (r, i) in zip(sources, targets, strict=True)])
            )  # fmt: skip
            keys, values = LibraryCache(cache).update(states, states + 0.5, 0)
            for source, target in zip(sources, targets, strict=True):
                table[target] = int(states.flatten()[source])
            assert keys.shape == (len(rows), 1, num_keys, 1)
            assert torch.equal(values[values != 0], keys[values != 0] + 0.5)
            for sequence, row in enumerate(rows):
                for index in range(num_keys):
                    if (row, index) in table:
                        assert keys[sequence, 0, index, 0] == table[row, index]


@dataclass
class Recomputed:
    """What a row's cache should hold: tokens, positions, and which entries each of them has seen."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sees: list[set[int]] = field(default_factory=list)

    def hidden(self, model: Backbone, tokens: list[int], positions: list[int], mask: Tensor) -> Tensor:
        """Recompute everything without a cache; ``mask`` says what the new tokens see of old and new ones."""
        old, total = len(self.tokens), len(self.tokens) + len(tokens)
        whole = torch.zeros(total, total, dtype=torch.bool)
        for query, seen in enumerate(self.sees):
            whole[query, sorted(seen)] = True
        whole[old:] = mask
        ids, places = torch.tensor([self.tokens + tokens]), torch.tensor([self.positions + positions])
        return model.hidden_states(ids, places, whole[None])[0, old:]

    def extend(self, tokens: list[int], positions: list[int], mask: Tensor) -> None:
        for token, position, seen in zip(tokens, positions, mask, strict=True):
            self.tokens.append(token)
            self.positions.append(position)
            self.sees.append(set(seen.nonzero().flatten().tolist()))

    def keep(self, indices: list[int]) -> None:
        """Keep entries that have seen nothing that goes."""
        place = {index: i for i, index in enumerate(indices)}
        self.tokens = [self.tokens[i] for i in indices]
        self.positions = [self.positions[i] for i in indices]
        self.sees = [{place[j] for j in self.sees[i]} for i in indices]


@pytest.mark.parametrize("seed", range(6))
def test_cached_states_are_those_of_a_full_recomputation(seed: int) -> None:
    """Branches that share a context, entries dropped and moved, rows of different lengths, growing storage."""
    chance = random.Random(seed)
    model, num_rows = tiny_backbone(), 3
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kv_cache, "CHUNK", 8)
        cache = KVCache(2, num_rows, capacity=4)
        known = [Recomputed() for _ in range(num_rows)]
        for _ in range(12):
            rows = chance.sample(range(num_rows), chance.randint(1, num_rows))
            length = chance.randint(1, 5)
            sequences: list[int] = []
            fed, places, masks, plan, expected = [], [], [], [], []
            kept_later: list[tuple[int, list[int], list[int], Tensor, int]] = []
            num_keys = max(len(known[row].tokens) for row in rows) + 3 * length
            for row in rows:
                context = known[row]
                num_old = len(context.tokens)
                for branch in range(chance.randint(1, 3)):
                    n = chance.randint(1, length)
                    tokens = [chance.randrange(VOCAB) for _ in range(n)]
                    positions = [chance.randrange(200) for _ in range(n)]
                    mask = torch.zeros(n, num_old + n, dtype=torch.bool)
                    mask[:, :num_old] = torch.rand(num_old, generator=torch.Generator().manual_seed(branch)) < 0.8
                    mask[:, num_old:] = torch.ones(n, n, dtype=torch.bool).tril()
                    expected.append(context.hidden(model, tokens, positions, mask))
                    first = num_old + branch * length
                    wide = torch.zeros(length, num_keys, dtype=torch.bool)
                    wide[:n, :num_old] = mask[:, :num_old]
                    wide[:n, first : first + n] = mask[:, num_old:]
                    wide[n:, first] = True
                    plan += [(len(sequences) * length + i, row, first + i) for i in range(n)]
                    sequences.append(row)
                    fed.append(tokens + [0] * (length - n))
                    places.append(positions + [0] * (length - n))
                    masks.append(wide)
                    if branch == 0:
                        kept_later.append((row, tokens, positions, mask, first))
            cache.prepare(sequences, num_keys, *write_plan(plan))
            hidden = model.hidden_states(torch.tensor(fed), torch.tensor(places), torch.stack(masks), cache)  # type: ignore[arg-type]
            for sequence, states in enumerate(expected):
                torch.testing.assert_close(hidden[sequence, : len(states)], states, **CLOSE)
            for row, tokens, positions, mask, first in kept_later:
                assert first == len(known[row].tokens)
                known[row].extend(tokens, positions, mask)
            for row in range(num_rows):
                if chance.random() < 0.5:
                    self_contained = choose_closed(known[row], chance)
                    cache.compact(row, self_contained)
                    known[row].keep(self_contained)
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
