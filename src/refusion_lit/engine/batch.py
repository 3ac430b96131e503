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
        cache: Is told where the forwards write and what they read; ``None``: they use none.

    Attributes:
        ids: Tokens.
        positions: Their positions in the text.
        visibility: Which cache entries each token sees or, without a cache, which tokens of its sequence.
        shapes: Number of sequences of each forward, and its length without padding.
        starts: First token of each branch, by forward, among the tokens of the forward's sequences, padding included.
    """

    ids: Int[Tensor, "sequence token"]
    positions: Int[Tensor, "sequence token"]

    def __init__(
        self, forwards: Sequence[Forward], storage: Sequence[int], device: torch.device, cache: KVCache | None
    ) -> None:
        self.shapes = [shape_of(forward) for forward in forwards]
        self.starts: list[list[int]] = []
        length = max(length for _, length in self.shapes)
        sequences: list[int] = []  # cache row of each sequence
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        targets: list[int] = []  # cache index and row of each token
        rows: list[int] = []
        source: list[int] = []  # its place among the tokens of all sequences, padding included
        num_keys = length if cache is None else 0
        for forward, row, (num_sequences, _) in zip(forwards, storage, self.shapes, strict=True):
            first = len(sequences) * length
            start = first
            starts = []
            sequences += [row] * num_sequences
            for branch in forward.branches:
                num_tokens = len(branch.tokens)
                sequence, offset = divmod(start, length)
                first_key = offset if cache is None else branch.write_at
                spans.append(Span(sequence, offset, num_tokens, first_key, branch.visible, branch.order))
                tokens += branch.tokens
                positions += branch.positions
                targets += range(first_key, first_key + num_tokens)
                rows += [row] * num_tokens
                source += range(start, start + num_tokens)
                num_keys = max(num_keys, first_key + num_tokens, *(stop for _, stop in branch.visible))
                starts.append(start - first)
                start += num_tokens if forward.packed else length
            self.starts.append(starts)
        shape = (len(sequences), length)
        # One host-to-device copy for everything.
        sent = to_device(np.array([tokens, positions, targets, rows, source], dtype=np.int64), device)
        laid_out = sent[:2]
        is_padded = len(tokens) < shape[0] * length
        if is_padded:
            laid_out = laid_out.new_zeros(2, shape[0] * length).index_copy_(1, sent[4], laid_out)
        self.ids, self.positions = laid_out.view(2, *shape).unbind()
        self.visibility = Visibility(spans, shape, num_keys)
        if cache is not None:
            cache.prepare(sequences, num_keys, sent[4] if is_padded else None, row_index=sent[3], cache_index=sent[2])
