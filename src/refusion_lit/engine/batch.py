"""A model call: many prompts' forwards in a padded batch.

Coordinates (docs/architecture.md has a picture): a *place* counts response tokens, a *position* text tokens, an
*offset* a branch's tokens, an *index* cache entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.engine.requests import Forward
from refusion_lit.modeling.devices import to_device
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Span, Visibility


def measure_shape(forward: Forward) -> tuple[int, int]:
    """Return the number and the length of the rows that a forward takes in a call."""
    lengths = [len(branch.tokens) for branch in forward.branches]
    return (1, sum(lengths)) if forward.packed else (len(lengths), max(lengths))


class Batch:
    """Forwards in a padded batch.

    Args:
        forwards: The forwards; all of them use the cache, or none does.
        cache_rows: The cache row of every forward.
        device: The model's device.
        cache: Gets the entries that the forwards write and read; ``None``: the forwards use no cache.

    Attributes:
        ids: Tokens.
        positions: Their positions in the text.
        visibility: The cache entries that every token sees or, without a cache, the tokens in its row.
        shapes: Every forward's number of rows, and its length without padding.
        num_tokens: Number of tokens, without padding.
        num_keys: Keys that attention reads per row: cache entries, including entries of the batch's own tokens.
        starts: First token of every branch, by forward, among the tokens of the forward's rows, padding included.
        signal: Soft embeddings of the tokens for self-conditioning; zeros for a branch without them; ``None`` if no
            branch has them.
    """

    ids: Int[Tensor, "row token"]
    positions: Int[Tensor, "row token"]
    signal: Float[Tensor, "row token hidden"] | None = None

    def __init__(
        self, forwards: Sequence[Forward], cache_rows: Sequence[int], device: torch.device, cache: KVCache | None
    ) -> None:
        self.shapes = [measure_shape(forward) for forward in forwards]
        self.starts: list[list[int]] = []
        length = max(length for _, length in self.shapes)
        batch_cache_rows: list[int] = []  # the cache row of every row of the batch
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        token_indices: list[int] = []  # cache index and cache row of every token
        token_rows: list[int] = []
        sources: list[int] = []  # where the token stands among the tokens of all rows, padding included
        num_keys = length if cache is None else 0
        for forward, cache_row, (num_rows, _) in zip(forwards, cache_rows, self.shapes, strict=True):
            first = len(batch_cache_rows) * length
            start = first
            starts = []
            batch_cache_rows += [cache_row] * num_rows
            for branch in forward.branches:
                num_tokens = len(branch.tokens)
                row, offset = divmod(start, length)
                first_key = offset if cache is None else branch.write_at
                spans.append(Span(row, offset, num_tokens, first_key, branch.visible, branch.order))
                tokens += branch.tokens
                positions += branch.positions
                token_indices += range(first_key, first_key + num_tokens)
                token_rows += [cache_row] * num_tokens
                sources += range(start, start + num_tokens)
                num_keys = max(num_keys, first_key + num_tokens, *(stop for _, stop in branch.visible))
                starts.append(start - first)
                start += num_tokens if forward.packed else length
            self.starts.append(starts)
        self.num_tokens = len(tokens)
        self.num_keys = num_keys
        shape = (len(batch_cache_rows), length)
        # One host-to-device copy for everything.
        columns = np.array([tokens, positions, token_indices, token_rows, sources], dtype=np.int64)
        sent = to_device(columns, device)
        laid_out = sent[:2]
        is_padded = len(tokens) < shape[0] * length
        if is_padded:
            laid_out = laid_out.new_zeros(2, shape[0] * length).index_copy_(1, sent[4], laid_out)
        self.ids, self.positions = laid_out.view(2, *shape).unbind()
        self.visibility = Visibility(spans, shape, num_keys)
        branches = [branch for forward in forwards for branch in forward.branches]
        for span, branch in zip(spans, branches, strict=True):
            if branch.signal is not None:
                if self.signal is None:
                    self.signal = branch.signal.new_zeros(*shape, branch.signal.shape[-1])
                self.signal[span.sequence, span.offset : span.offset + span.length] = branch.signal
        if cache is not None:
            source = sent[4] if is_padded else None
            cache.prepare(batch_cache_rows, num_keys, source, row_index=sent[3], cache_index=sent[2])
