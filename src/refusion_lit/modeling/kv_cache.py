"""Preallocated KV cache with a storage region per row.

A *cache index* is the index of a token's keys and values in its row's storage. It is not the token's position in the
text: committing, cropping and reordering only move entries. Before a forward pass, the caller declares the indices to
which the tokens are written. The attention mask defines which entries a query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.devices import to_device

CHUNK = 128
"""The number of entries in a row's storage is a multiple of this number."""


class KVCache:
    """Preallocated keys and values of several rows.

    Args:
        num_layers: Number of the model's layers.
        num_rows: Number of storage rows, a row per prompt in flight.
        capacity: Initial number of entries per row; grows by a quarter or more, in chunks of the initial number (at
            least 128).

    Attributes:
        sequences: The storage row of every sequence in the prepared forward pass. A row may serve several sequences.
        rows: ``sequences`` as a tensor; ``slice(None)`` if the sequences are all rows in order.
        num_keys: The forward pass attends to the first ``num_keys`` entries of its rows, under its mask.
        source_index: Flat indices (sequence times padded length plus offset) of the tokens to store; ``None`` stores
            all tokens in their order.
        write_index: Flat indices into the storage, by stored token.

    Examples:
        >>> import torch
        >>> cache = KVCache(num_layers=1, num_rows=1)
        >>> cache.prepare([0], 2, None, row_index=torch.tensor([0, 0]), cache_index=torch.tensor([0, 1]))
        >>> states = torch.tensor([[[1.0]], [[2.0]]])  # two tokens, a head with a single channel
        >>> keys, values = cache.store(0, states, -states)
        >>> keys.shape, keys[0, :3].flatten().tolist()
        (torch.Size([1, 128, 1, 1]), [1.0, 2.0, 0.0])
    """

    def __init__(self, num_layers: int, num_rows: int, capacity: int = CHUNK) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self._chunk = max(capacity, CHUNK)
        self._stored: list[list[Tensor]] = [[] for _ in range(num_layers)]  # keys and values by layer, once known

    def prepare(
        self,
        rows: list[int],
        num_keys: int,
        source_index: Int[Tensor, " token"] | None,
        row_index: Int[Tensor, " token"],
        cache_index: Int[Tensor, " token"],
    ) -> None:
        """Set where the next forward pass writes and what it reads; see the attributes.

        Args:
            rows: The value of :attr:`sequences`.
            num_keys: See the attribute.
            source_index: See the attribute.
            row_index: Storage rows, by stored token.
            cache_index: Cache indices, by stored token.
        """
        if num_keys > self.capacity:
            wanted = max(num_keys, self.capacity * 5 // 4)  # at least a quarter more, to grow rarely
            missing = -(-wanted // self._chunk) * self._chunk - self.capacity
            self.capacity += missing
            for layer in self._stored:  # grow tensors in turn, so that only a single tensor is in memory twice
                for number, states in enumerate(layer):
                    layer[number] = F.pad(states, (0, 0, 0, 0, 0, missing))
        self.sequences = rows
        all_rows = rows == list(range(self.num_rows))
        self.rows = slice(None) if all_rows else to_device(rows, cache_index.device)
        self.num_keys = num_keys
        self.source_index = source_index
        self.write_index = row_index * self.capacity + cache_index

    @property
    def num_bytes(self) -> int:
        """The storage's memory in bytes. It never shrinks, so after the last forward pass this is the peak."""
        return sum(states.nbytes for states in chain(*self._stored))

    def store(
        self, layer: int, keys: Float[Tensor, "token head dim"], values: Float[Tensor, "token value_head value_dim"]
    ) -> tuple[Float[Tensor, "row entry head dim"], Float[Tensor, "row entry value_head value_dim"]]:
        """Write a layer's keys and values as prepared and return the whole storage.

        Keys and values may have different types and sizes: under autocast, rotary embeddings leave keys in float32,
        and latent attention stores a latent state and a rotary key.
        """
        if not self._stored[layer]:
            size = self.num_rows, self.capacity
            self._stored[layer] = [like.new_zeros(*size, *like.shape[1:]) for like in (keys, values)]
        stored_keys, stored_values = self._stored[layer]
        stored_keys.flatten(0, 1).index_copy_(0, self.write_index, keys)
        stored_values.flatten(0, 1).index_copy_(0, self.write_index, values)
        return stored_keys, stored_values

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a row's first ``length`` entries to another row."""
        if source != target:
            for states in chain(*self._stored):
                states[target, :length] = states[source, :length]

    def compact(self, row: int, indices: Sequence[int], num_leading: int = 0) -> None:
        """Move the entries at ``indices``, in this order, behind the row's leading entries; discard all others.

        Args:
            row: Storage row.
            indices: Cache indices to keep. Entries at the start that are already in place are not moved.
            num_leading: Number of leading entries that stay in place.
        """
        start = next((i for i, index in enumerate(indices) if index != num_leading + i), len(indices))
        stored = [*chain(*self._stored)]
        if stored and start < len(indices):
            index = to_device(indices[start:], stored[0].device)
            for states in stored:
                states[row, num_leading + start : num_leading + len(indices)] = states[row, index]
