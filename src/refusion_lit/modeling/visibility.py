"""Visibility: which keys each token of a batch sees, as spans or, for kernels that need one, as a matrix.

For accelerators the matrix is built on the device from ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.modeling.devices import to_device
from refusion_lit.modeling.spans import Span, ranges_mask, spans_ranges

_TRIANGLE = np.tri(128, dtype=bool)
"""Causal matrices of short spans are views of it."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Keys that the tokens of a padded batch see: cache entries or, without a cache, tokens of the sequence.

    Attributes:
        spans: Spans of all tokens but padding, by sequence and offset. Every sequence has a span at offset 0.
        shape: Number of sequences, and of tokens in each sequence.
        num_keys: Number of keys of each sequence.
    """

    spans: Sequence[Span]
    shape: tuple[int, int]
    num_keys: int

    def additive_mask(self) -> Float[Tensor, "sequence token key"]:
        """Return the matrix on the host as what is added to scores, in float32: 0 for keys that are seen, else -inf.

        Padding sees the first key of its sequence: a query without keys gives NaN.
        """
        matrix = np.full((*self.shape, self.num_keys), -np.inf, np.float32)
        is_padded = sum(span.length for span in self.spans) < self.shape[0] * self.shape[1]
        for span in self.spans:
            if is_padded and span.offset == 0:
                matrix[span.sequence, :, span.first_key] = 0  # what padding sees
            tokens = matrix[span.sequence, span.offset : span.offset + span.length]
            if is_padded:
                tokens[:] = -np.inf
            for start, stop in span.context:
                tokens[:, start:stop] = 0
            own = tokens[:, span.first_key : span.first_key + span.length]
            np.copyto(own, 0, where=_own_mask(span.order, span.length))
        return torch.from_numpy(matrix)


AttentionMask = Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"]
"""What each token sees: spans, a matrix (``True`` where a query sees a key), or ranges of keys whose union it sees."""


def as_mask(
    attention: AttentionMask, device: torch.device, num_keys: int | None = None
) -> Bool[Tensor, "batch token key"]:
    """Return what tokens see as a matrix on a device; only ranges are copied to the device.

    Args:
        attention: What each token sees; a tensor is on the device already.
        device: Where the matrix is wanted.
        num_keys: Number of keys, for ranges without spans; by default the number of tokens.
    """
    if isinstance(attention, Visibility):
        if device.type == "cpu":
            return attention.additive_mask() == 0
        return ranges_mask(to_device(spans_ranges(attention.spans, attention.shape), device), attention.num_keys)
    return attention if attention.ndim == 3 else ranges_mask(attention, num_keys or attention.shape[1])


def _own_mask(order: Sequence[int] | None, length: int) -> Bool[np.ndarray, "token token"]:
    if order is None:
        return _TRIANGLE[:length, :length] if length <= len(_TRIANGLE) else np.tri(length, dtype=bool)
    orders = np.asarray(order)
    return orders[None, :] <= orders[:, None]
