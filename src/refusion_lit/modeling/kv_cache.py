"""A preallocated key/value cache with one region of storage for every row.

A *cache index* says where in its row's storage a token's keys and values lie. It is not a position (the
place in the text): accepting, cropping and re-ordering only move indices. Each forward says beforehand
which indices its tokens are written to; which entries a query sees is the attention mask's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from refusion_lit.modeling.transfer import to_device

_CHUNK = 128
_STATIC_CHUNKS = 4


class _StoredLayer(DynamicLayer):
    """Keys and values of one layer; :meth:`update` writes where the owning cache was told to."""

    def __init__(self, owner: KVCache) -> None:
        super().__init__()
        self._owner_ref = ref(owner)  # no cycle: storage is to be freed with the cache, not some time later
        self.stored_keys: Tensor | None = None
        self.stored_values: Tensor | None = None

    @property
    def _owner(self) -> KVCache:
        owner = self._owner_ref()
        assert owner is not None, "the KVCache must live as long as its past_key_values are used"
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, capacity = self._owner.num_rows, self._owner.capacity
        self.stored_keys = key_states.new_zeros(rows, capacity, key_states.shape[1], key_states.shape[3])
        self.stored_values = value_states.new_zeros(rows, capacity, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ANN401, ARG002 - the signature is transformers'
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> tuple[Tensor, Tensor]:
        """Write [sequence, head, token, dim] states and return what the sequences may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._owner.prepared
        flat = [states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states)]
        keys, values = self.store(plan, *(plan.stored_of(states) for states in flat))
        return plan.visible(keys).transpose(1, 2), plan.visible(values).transpose(1, 2)

    def store(self, plan: _Plan, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [token, head, dim] states of the tokens to store and return all that is stored."""
        if not self.is_initialized:
            # The library's order of axes: its method of this name belongs to its interface.
            self.lazy_initialization(keys[None].transpose(1, 2), values[None].transpose(1, 2))
        stored_keys, stored_values = self.stored_keys, self.stored_values
        assert stored_keys is not None
        assert stored_values is not None
        stored_keys.flatten(0, 1).index_copy_(0, plan.write_index, keys)
        stored_values.flatten(0, 1).index_copy_(0, plan.write_index, values)
        return stored_keys, stored_values

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` entries a row; what is stored stays where it is."""
        if self.stored_keys is None or self.stored_values is None:
            return
        missing = capacity - self.stored_keys.shape[1]
        self.stored_keys = torch.nn.functional.pad(self.stored_keys, (0, 0, 0, 0, 0, missing))
        self.stored_values = torch.nn.functional.pad(self.stored_values, (0, 0, 0, 0, 0, missing))

    def compact(self, row: int, indices: Tensor, start: int) -> None:
        """Move the entries at ``indices`` of a row to ``start`` and behind, in the order given."""
        assert self.stored_keys is not None
        assert self.stored_values is not None
        self.stored_keys[row, start : start + len(indices)] = self.stored_keys[row, indices]
        self.stored_values[row, start : start + len(indices)] = self.stored_values[row, indices]

    def get_seq_length(self) -> int:
        """Return 0: masks and positions are always explicit, so nothing may be derived from a length."""
        return 0


@dataclass(slots=True)
class _Plan:
    """What :meth:`KVCache.prepare` was told.

    Attributes:
        sequences: Storage row of each sequence.
        rows: The same as a tensor; ``None`` if the sequences are all rows in order.
        num_keys: Entries that may be seen.
        source_index: Flat index of every token to store, ``None`` for all tokens.
        write_index: Flat index into storage of every token.
    """

    sequences: list[int]
    rows: Tensor | None
    num_keys: int
    source_index: Tensor | None
    write_index: Tensor

    def stored_of(self, states: Tensor) -> Tensor:
        return states if self.source_index is None else states[self.source_index]

    def visible(self, stored: Tensor) -> Tensor:
        seen = stored[:, : self.num_keys]
        return seen if self.rows is None else seen[self.rows]


class KVCache:
    """Preallocated keys and values for several rows; works as transformers' ``past_key_values``.

    Args:
        num_layers: Layers of the model.
        num_rows: Rows of storage, one a prompt being decoded.
        capacity: Entries a row to begin with; grows by chunks of 128.
        static: Begin with 512 and double instead, so that storage changes seldom, and keep its last entry free: what
            nobody shall see may be written there.

    Attributes:
        lean: What the model that made the cache runs its body by, in place of the library's forward.
    """

    def __init__(self, num_layers: int, num_rows: int, capacity: int = _CHUNK, *, static: bool = False) -> None:
        self.num_rows = num_rows
        self._static = static
        self.capacity = max(capacity, _STATIC_CHUNKS * _CHUNK) if static else capacity
        self._plan: _Plan | None = None
        self.lean: Callable[..., Tensor] | None = None
        self._layers = [_StoredLayer(self) for _ in range(num_layers)]
        self.past_key_values = Cache(layers=list(self._layers))

    @property
    def prepared(self) -> _Plan:
        """What :meth:`prepare` said last."""
        assert self._plan is not None, "KVCache.prepare must be called before each forward"
        return self._plan

    def prepare(
        self,
        rows: list[int],
        num_keys: int,
        source_index: Int[Tensor, " token"] | None,
        row_index: Int[Tensor, " token"],
        cache_index: Int[Tensor, " token"],
    ) -> None:
        """Say where the next forward writes and what it reads.

        Args:
            rows: Storage row of each sequence of the forward; a row may serve several sequences.
            num_keys: The forward attends to the first so many entries of its rows (its mask says which of them).
            source_index: Flat index (sequence times padded length plus offset) of every token to store; ``None`` stores
                all tokens of the forward in their order.
            row_index: Storage row of each of those tokens.
            cache_index: Cache index of each of those tokens; below ``num_keys``.
        """
        needed = num_keys + self._static
        if needed > self.capacity:
            if self._static:
                self.capacity = 1 << (needed - 1).bit_length()
            else:
                self.capacity = -(-needed // _CHUNK) * _CHUNK
            for layer in self._layers:
                layer.grow(self.capacity)
        device = cache_index.device
        all_rows = rows == list(range(self.num_rows))
        selected = None if all_rows else to_device(rows, device)
        self._plan = _Plan(rows, selected, num_keys, source_index, row_index * self.capacity + cache_index)

    def storage(
        self, num_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Float[Tensor, "row entry head dim"]], list[Float[Tensor, "row entry head dim"]]]:
        """Return what stores keys and values, a tensor a layer, for those who write into it by themselves."""
        none = torch.empty(1, num_heads, 0, head_dim, dtype=dtype, device=device)
        keys, values = [], []
        for layer in self._layers:
            if not layer.is_initialized:
                layer.lazy_initialization(none, none)
            keys.append(layer.stored_keys)
            values.append(layer.stored_values)
        return keys, values

    def adopt(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Use what a cache of as many rows, now gone, gave as :meth:`storage`; nothing has been stored yet."""
        self.capacity = keys[0].shape[1]
        for layer, *stored in zip(self._layers, keys, values, strict=True):
            layer.stored_keys, layer.stored_values = (states.zero_() for states in stored)
            layer.dtype, layer.device, layer.is_initialized = keys[0].dtype, keys[0].device, True

    def update(
        self, layer: int, keys: Float[Tensor, "token head dim"], values: Float[Tensor, "token head dim"]
    ) -> tuple[Float[Tensor, "sequence key head dim"], Float[Tensor, "sequence key head dim"]]:
        """Write a layer's keys and values as prepared and return what each sequence may attend to.

        Args:
            layer: Number of the layer.
            keys: Of the tokens to store, in the order prepared.
            values: Likewise.
        """
        plan = self.prepared
        keys, values = self._layers[layer].store(plan, keys, values)
        return plan.visible(keys), plan.visible(values)

    def store(
        self, layer: int, keys: Float[Tensor, "token head dim"], values: Float[Tensor, "token head dim"]
    ) -> tuple[Float[Tensor, "row entry head dim"], Float[Tensor, "row entry head dim"]]:
        """Write a layer's keys and values as prepared and return the whole storage; see :meth:`update`."""
        return self._layers[layer].store(self.prepared, keys, values)

    def compact(self, row: int, indices: list[int]) -> None:
        """Make the entries at ``indices`` the row's first ones, in that order; what else is stored is forgotten.

        Args:
            row: Storage row.
            indices: Cache indices to keep; a leading run that is in place already costs nothing.
        """
        start = next((i for i, index in enumerate(indices) if index != i), len(indices))
        if start == len(indices):
            return
        index: Tensor | None = None
        for layer in self._layers:
            if layer.stored_keys is not None:
                if index is None or index.device != layer.stored_keys.device:
                    index = to_device(indices[start:], layer.stored_keys.device)
                layer.compact(row, index, start)
