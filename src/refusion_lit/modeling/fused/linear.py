"""Linear layers of the fused backbone, with packed weights that make products of a few tokens fast on CPUs.

A decode step multiplies a few tokens with every weight. The usual product is optimised for one row or for many.
oneDNN's product with packed weights takes down to half the time for numbers in between, and about the same time for
others. Layers with the same input, such as those of queries, keys and values, are one product, since each call of
oneDNN costs as much as a small product (``benchmarks/kernels.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

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


NUM_PADDED_ROWS = 4
"""Rows of a padded product of one token."""

_MOST_PADDED_TIME = 0.9
"""Largest time of a padded product, relative to the plain one, at which products are padded."""

_MEASURED_SECONDS = 2e-3

_is_padding_faster: dict[tuple[Any, ...], bool] = {}
"""Whether products of one token are padded, by shape and type of the weights and torch's number of threads."""


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

    @staticmethod
    def takes(weights: Sequence[Float[Tensor, "_ input"]]) -> bool:
        """Whether weights may have a joint copy: not on other devices, nor in other types, nor small ones."""
        return not _is_small(weights) and all(
            weight.device.type == "cpu"
            and weight.dtype in _TYPES
            and not weight.is_inference()
            and _is_supported(weight.dtype)
            for weight in weights
        )

    def of(self, weights: Sequence[Float[Tensor, "_ input"]]) -> Tensor | None:
        """Return the joint copy of weights that :meth:`takes` allows; ``None`` if the memory for it is used up."""
        first = weights[0]
        with self._lock:  # threads that decode with one model share its copies
            found = self._copies.get(first)
            state = [(weight.data_ptr(), weight._version) for weight in weights]
            if found is not None and found[0] == state:
                return found[1]
            others = sum(size for other, (_, _, size) in self._copies.items() if other is not first)
            num_bytes = _num_bytes(weights)
            if others + num_bytes > _MOST_BYTES:
                return None
            copy = torch.ops.mkldnn._reorder_linear_weight(torch.cat([weight.detach() for weight in weights]))
            self._copies[first] = (state, copy, num_bytes)
            return copy


class Linear:
    """y = W x + b without gradients, of one layer or of several with the same input, with a copy of W if it pays.

    Args:
        weights: W of each layer; their outputs are concatenated.
        biases: b of each layer, or ``None`` for all of them.
        packed: Store of copies; ``None`` for no copies.
        batch_invariant: Multiply a fixed number of tokens at a time, so that no result depends on other tokens.
    """

    __slots__ = ("_batch_invariant", "_copy", "_packed", "_pads", "_small", "_transposed", "bias", "biases", "weights")

    def __init__(
        self,
        weights: Sequence[Float[Tensor, "_ input"]],
        biases: Sequence[Tensor | None] = (None,),
        packed: PackedWeights | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        present = [bias for bias in biases if bias is not None]
        assert len(present) in (0, len(weights)), "layers that are one product have biases all or none"
        self.weights = tuple(weights)
        self.biases = tuple(biases) if present else (None,) * len(self.weights)
        self.bias = torch.cat(present) if len(present) > 1 else next(iter(present), None)
        self._small = torch.cat([weight.detach() for weight in weights]) if _is_small(weights) else None
        self._transposed = None if self._small is None or batch_invariant else self._small.t()
        self._batch_invariant = batch_invariant
        self._packed = packed if packed is not None and packed.takes(weights) else None
        self._copy: Tensor | None = None
        self._pads: bool | None = None

    def __call__(self, x: Float[Tensor, "*shape input"]) -> Float[Tensor, "*shape output"]:
        """Return y."""
        return in_blocks(self._product, x) if self._batch_invariant else self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        if self._small is not None:
            return F.linear(x, self._small, self.bias)
        if self._copy is None and self._packed is not None:
            self._copy = self._packed.of(self.weights)
        if self._copy is None:
            outputs = [F.linear(x, *layer) for layer in zip(self.weights, self.biases, strict=True)]
            return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        if x.numel() != x.shape[-1]:
            return _packed_product(x, self._copy, self.bias)
        if self._pads is None:
            self._pads = pads_one_token(x, self._copy, self.bias)
        return (_padded_product if self._pads else _packed_product)(x, self._copy, self.bias)

    def add_to(self, hidden: Float[Tensor, "token output"], x: Float[Tensor, "token input"]) -> None:
        """Add y to states in place; for layers without biases. Small ones are one call (benchmarks/fast_paths.py)."""
        if self._transposed is not None:
            hidden.addmm_(x, self._transposed)
        else:
            hidden.add_(self(x))


def _packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _padded_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply one token as ``NUM_PADDED_ROWS`` equal rows."""
    rows = x.reshape(1, -1).expand(NUM_PADDED_ROWS, -1)
    return _packed_product(rows, weight, bias)[0].view(*x.shape[:-1], -1)


def pads_one_token(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether to pad products of one token, because a padded product is faster.

    On some processors, oneDNN's product of four rows takes less time than the product of one row. The first call for a
    shape, type and number of threads measures both, so that all products of a process round alike.

    Args:
        x: One token's input.
        weight: Packed weights.
        bias: Added to the product.
    """
    key = (weight.shape, weight.dtype, bias is None, torch.get_num_threads())
    if key not in _is_padding_faster:
        best = {product: float("inf") for product in (_packed_product, _padded_product)}
        started = time.perf_counter()
        num_rounds = 0
        while num_rounds < 3 or time.perf_counter() - started < _MEASURED_SECONDS:
            for product in best:
                before = time.perf_counter()
                product(x, weight, bias)
                best[product] = min(best[product], time.perf_counter() - before)
            num_rounds += 1
        is_faster = best[_padded_product] < _MOST_PADDED_TIME * best[_packed_product]
        _is_padding_faster.setdefault(key, is_faster)  # a second thread takes the first one's decision
    return _is_padding_faster[key]


def in_blocks(product: Callable[[Tensor], Tensor], x: Float[Tensor, "*shape input"]) -> Float[Tensor, "*shape output"]:
    """Multiply ``NUM_ROWS`` rows at a time, the last ones padded.

    Args:
        product: A linear map of rows.
        x: Its input.
    """
    rows = x.reshape(-1, x.shape[-1])
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % NUM_ROWS)).split(NUM_ROWS)
    return torch.cat([product(block) for block in blocks])[: len(rows)].view(*x.shape[:-1], -1)


def _num_bytes(weights: Sequence[Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _is_small(weights: Sequence[Tensor]) -> bool:
    return sum(weight.numel() for weight in weights) < _FEWEST_ELEMENTS


def _is_supported(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def untraced(fast: Callable[..., Tensor], general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that calls ``fast``, which has no gradients and no autocast, or ``general`` where one is on."""

    def call(first: Tensor, *others: Any) -> Tensor:  # noqa: ANN401 - of all kinds
        is_traced = torch.is_grad_enabled() or torch.is_autocast_enabled(first.device.type)
        return (general if is_traced else fast)(first, *others)

    return call
