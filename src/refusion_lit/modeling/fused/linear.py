"""Linear layers of the fused backbone, with packed weights that make products of a few tokens fast on CPUs.

A decode step multiplies a few tokens with every weight. The usual product is optimised for one row or for many.
oneDNN's product with packed weights takes down to half the time for numbers in between, and the same time for others
(``benchmarks/kernels.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

_TYPES = (torch.float32, torch.bfloat16)

_FEWEST_ELEMENTS = 1 << 16
"""Smaller weights stay in the processor's caches in any layout."""

_MOST_BYTES = 4 << 30

NUM_ROWS = 8
"""Rows of every product with batch invariance."""


class PackedWeights:
    """Copies of weights in oneDNN's layout, made on first use and renewed after a weight has changed.

    They take as much memory as the weights, 4 GiB at most. A change that goes around torch's count of changes (by
    ``Tensor.data``, or by a fused optimizer) is not seen: ``Backbone.forward`` drops all copies when it runs for
    training.
    """

    def __init__(self) -> None:
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PackedWeights], tuple[()]]:
        """Leave the copies out of copies and pickles of a model."""
        return PackedWeights, ()

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self._copies)

    @staticmethod
    def takes(weight: Float[Tensor, "output input"]) -> bool:
        """Whether a weight may have a copy: not on other devices, nor in other types, nor a small one."""
        return (
            weight.numel() >= _FEWEST_ELEMENTS
            and weight.device.type == "cpu"
            and weight.dtype in _TYPES
            and not weight.is_inference()
            and _is_supported(weight.dtype)
        )

    def of(self, weight: Float[Tensor, "output input"]) -> Tensor | None:
        """Return the copy of a weight that :meth:`takes` allows; ``None`` if the memory for it is used up."""
        with self._lock:  # threads that decode with one model share its copies
            found = self._copies.get(weight)
            state = (weight.data_ptr(), weight._version)
            if found is not None and found[0] == state:
                return found[1]
            others = sum(_num_bytes(other) for other in self._copies if other is not weight)
            if others + _num_bytes(weight) > _MOST_BYTES:
                return None
            copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
            self._copies[weight] = (state, copy)
            return copy


class Linear:
    """y = W x + b without gradients, with a packed weight where there is one.

    Args:
        weight: W.
        bias: b.
        packed: Store of packed copies; ``None`` for no copies.
        batch_invariant: Multiply a fixed number of tokens at a time, so that no result depends on other tokens.
    """

    __slots__ = ("_batch_invariant", "_copy", "_packed", "bias", "weight")

    def __init__(
        self,
        weight: Float[Tensor, "output input"],
        bias: Tensor | None = None,
        packed: PackedWeights | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._batch_invariant = batch_invariant
        self._packed = packed if packed is not None and packed.takes(weight) else None
        self._copy: Tensor | None = None

    def __call__(self, x: Float[Tensor, "*shape input"]) -> Float[Tensor, "*shape output"]:
        """Return y."""
        if self._batch_invariant:
            return in_blocks(self._product, x)
        return F.linear(x, self.weight, self.bias) if self._packed is None else self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        copy = self._packed_copy()
        return F.linear(x, self.weight, self.bias) if copy is None else _product(x, copy, self.bias)

    def add_to(self, hidden: Float[Tensor, "token output"], x: Float[Tensor, "token input"]) -> None:
        """Add y to states in place; for layers without a bias."""
        if self._batch_invariant:
            hidden.add_(self(x))
            return
        copy = self._packed_copy()
        if copy is None:
            hidden.addmm_(x, self.weight.t())
        else:
            hidden.add_(_product(x, copy, None))

    def _packed_copy(self) -> Tensor | None:
        if self._copy is None and self._packed is not None:
            self._copy = self._packed.of(self.weight)
        return self._copy


def in_blocks(product: Callable[[Tensor], Tensor], x: Float[Tensor, "*shape input"]) -> Float[Tensor, "*shape output"]:
    """Multiply ``NUM_ROWS`` rows at a time, the last ones padded.

    Args:
        product: A linear map of rows.
        x: Its input.
    """
    rows = x.reshape(-1, x.shape[-1])
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % NUM_ROWS)).split(NUM_ROWS)
    return torch.cat([product(block) for block in blocks])[: len(rows)].view(*x.shape[:-1], -1)


def _product(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")


def _num_bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


def _is_supported(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
