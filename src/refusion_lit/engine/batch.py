"""One call of the model: the forwards of many prompts as one padded batch.

Coordinates (docs/architecture.md has a picture): a *place* counts tokens of the response, a *position* tokens of the
text, an *offset* tokens of a branch, an *index* entries of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from refusion_lit.engine.requests import Forward
from refusion_lit.modeling.devices import to_device
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Span, Visibility


def shape_of(forward: Forward) -> tuple[int, int]:
    """Return rows and length of a forward's share of a call."""
    lengths = [len(branch.tokens) for branch in forward.branches]
    return (1, sum(lengths)) if forward.packed else (len(lengths), max(lengths))


class Batch:
    """A padded batch of forwards.

    Args:
        forwards: The forwards; all of them use the cache, or none does.
        storage: Each forward's row of the cache.
        device: Device of the model.

    Attributes:
        ids: Tokens.
        positions: Their positions in the text.
        visibility: Which cache entries each token sees or, without a cache, which tokens of its sequence.
        parts: The tokens of each forward, padding included, among those of all sequences joined.
        starts: First token of each branch within the forward's part, by forward.
    """

    ids: Int[Tensor, "sequence token"]
    positions: Int[Tensor, "sequence token"]

    def __init__(self, forwards: Sequence[Forward], storage: Sequence[int], device: torch.device) -> None:
        shapes = [shape_of(forward) for forward in forwards]
        length = max((shape[1] for shape in shapes), default=0)
        if not length:
            raise ValueError("decoder: expected a Forward of branches with tokens, got none; see docs/extending.md.")
        is_cached = forwards[0].cached
        self.parts: list[slice] = []
        self.starts: list[list[int]] = []
        self._rows: list[int] = []
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        targets: list[int] = []  # cache index and row of each token
        rows: list[int] = []
        source: list[int] = []  # its place among the tokens of all sequences, padding included
        num_keys = 0 if is_cached else length
        for forward, row, (num_sequences, _) in zip(forwards, storage, shapes, strict=True):
            first = len(self._rows) * length
            start = first
            self.parts.append(slice(first, first + num_sequences * length))
            self.starts.append([])
            self._rows += [row] * num_sequences
            for branch in forward.branches:
                num_tokens = len(branch.tokens)
                sequence, offset = divmod(start, length)
                first_key = branch.write_at if is_cached else offset
                spans.append(Span(sequence, offset, num_tokens, first_key, branch.visible, branch.order))
                tokens += branch.tokens
                positions += branch.positions
                targets += range(first_key, first_key + num_tokens)
                rows += [row] * num_tokens
                source += range(start, start + num_tokens)
                num_keys = max(num_keys, first_key + num_tokens, *(stop for _, stop in branch.visible))
                self.starts[-1].append(start - first)
                start += num_tokens if forward.packed else length
        if len(tokens) != len(positions) or min(positions) < 0:
            got = f"{len(tokens)} tokens and {len(positions)} positions from {min(positions, default=0)}"
            raise ValueError(
                f"decoder: expected branches with a position from 0 for each token, got {got}; count them."
            )
        shape = (len(self._rows), length)
        # One host-to-device copy for everything.
        self._sent = to_device(np.array([tokens, positions, targets, rows, source], dtype=np.int64), device)
        self._is_padded = len(tokens) < shape[0] * length
        laid_out = self._sent[:2]
        if self._is_padded:
            laid_out = laid_out.new_zeros(2, shape[0] * length).index_copy_(1, self._sent[4], laid_out)
        self.ids, self.positions = laid_out.view(2, *shape).unbind()
        self.visibility = Visibility(spans, shape, num_keys)

    def prepare(self, cache: KVCache) -> None:
        """Tell a cache where the forwards write and what they read."""
        _, _, targets, rows, source = self._sent.unbind()
        num_keys = self.visibility.num_keys
        cache.prepare(self._rows, num_keys, source if self._is_padded else None, row_index=rows, cache_index=targets)
