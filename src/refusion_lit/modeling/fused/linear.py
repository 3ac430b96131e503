"""Linear layers for the fused backbone, with packed weights that speed up products with few tokens on CPUs.

A decode step multiplies a few tokens with every weight. torch's usual product is optimised for a single row or for many
rows. For numbers in between, oneDNN's product with packed weights takes as little as half the time; for other numbers,
about the same time. Layers with the same input, such as the query, key and value layers, share a product, because a
call of oneDNN costs as much as a small product (``benchmarks/kernels.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

_TYPES = (torch.float32, torch.bfloat16)

_FEWEST_ELEMENTS = 1 << 16
"""Smaller weights are not packed: they stay in the processor's caches in any layout."""

_MOST_BYTES = 4 << 30

NUM_ROWS = 8
"""Rows per product with batch invariance."""


class PackedWeights:
    """Copies of weights in oneDNN's layout, made on first use and renewed after a weight has changed.

    Copies take as much memory as the weights, at most 4 GiB. Changes through ``Tensor.data`` or by a fused optimizer
    bypass torch's version counter and are not noticed. ``Backbone.forward`` therefore drops all copies in training.
    """

    def __init__(self) -> None:
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PackedWeights], tuple[()]]:
        """Exclude packed weights when a model is copied or pickled."""
        return PackedWeights, ()

    @staticmethod
    def supports(weights: Sequence[Float[Tensor, "_ input"]]) -> bool:
        """Return whether weights can be packed together: large float32 or bfloat16 weights on a CPU."""
        return not _is_small(weights) and all(
            weight.device.type == "cpu"
            and weight.dtype in _TYPES
            and not weight.is_inference()
            and _is_supported(weight.dtype)
            for weight in weights
        )

    def get_copy(self, weights: Sequence[Float[Tensor, "_ input"]]) -> Tensor | None:
        """Return the packed copy of supported weights, concatenated; ``None`` if the memory limit is reached."""
        first = weights[0]
        with self._lock:  # threads that decode with the same model share its copies
            cached = self._copies.get(first)
            state = [(weight.data_ptr(), weight._version) for weight in weights]
            if cached is not None and cached[0] == state:
                return cached[1]
            others = sum(size for other, (_, _, size) in self._copies.items() if other is not first)
            num_bytes = _num_bytes(weights)
            if others + num_bytes > _MOST_BYTES:
                return None
            copy = torch.ops.mkldnn._reorder_linear_weight(torch.cat([weight.detach() for weight in weights]))
            self._copies[first] = (state, copy, num_bytes)
            return copy


class Linear:
    """y = W x + b without gradients, for a layer or for several layers with the same input.

    Args:
        weights: W per layer; the layers' outputs are concatenated.
        biases: b per layer, or ``None`` for all layers.
        packed: Stores packed weights; ``None``: use torch's product.
        batch_invariant: Multiply a fixed number of tokens at a time, so that no result depends on other tokens.
    """

    __slots__ = ("_batch_invariant", "_copy", "_packed", "_small", "_transposed", "bias", "biases", "weights")

    def __init__(
        self,
        weights: Sequence[Float[Tensor, "_ input"]],
        biases: Sequence[Tensor | None] = (None,),
        packed: PackedWeights | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        present = [bias for bias in biases if bias is not None]
        assert len(present) in (0, len(weights)), "layers in a product must all have biases, or none"
        self.weights = tuple(weights)
        self.biases = tuple(biases) if present else (None,) * len(self.weights)
        self.bias = torch.cat(present) if len(present) > 1 else next(iter(present), None)
        self._small = torch.cat([weight.detach() for weight in weights]) if _is_small(weights) else None
        self._transposed = None if self._small is None or batch_invariant else self._small.t()
        self._batch_invariant = batch_invariant
        self._packed = packed if packed is not None and packed.supports(weights) else None
        self._copy: Tensor | None = None

    def __call__(self, x: Float[Tensor, "*shape input"]) -> Float[Tensor, "*shape output"]:
        """Return y; with batch invariance, multiply ``NUM_ROWS`` rows at a time, of which the last are padded."""
        if not self._batch_invariant:
            return self._product(x)
        rows = x.reshape(-1, x.shape[-1])
        blocks = F.pad(rows, (0, 0, 0, -len(rows) % NUM_ROWS)).split(NUM_ROWS)
        return torch.cat([self._product(block) for block in blocks])[: len(rows)].view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        if self._small is not None:
            return F.linear(x, self._small, self.bias)
        if self._copy is None and self._packed is not None:
            self._copy = self._packed.get_copy(self.weights)
        if self._copy is None:
            outputs = [F.linear(x, *layer) for layer in zip(self.weights, self.biases, strict=True)]
            return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return torch.ops.mkldnn._linear_pointwise(x, self._copy, self.bias, "none", [], "")

    def add_to(self, hidden: Float[Tensor, "token output"], x: Float[Tensor, "token input"]) -> None:
        """Add y to hidden states in place, for layers without biases.

        Small layers need a single call (benchmarks/fast_paths.py).
        """
        if self._transposed is not None:
            hidden.addmm_(x, self._transposed)
        else:
            hidden.add_(self(x))


def _num_bytes(weights: Sequence[Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _is_small(weights: Sequence[Tensor]) -> bool:
    return sum(weight.numel() for weight in weights) < _FEWEST_ELEMENTS


def _is_supported(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def dispatch_inference(fast: Callable[..., Tensor], general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that calls ``general`` if gradients or autocast are enabled, and otherwise ``fast``."""

    def call(first: Tensor, *others: Any) -> Tensor:  # noqa: ANN401 - any arguments
        needs_general = torch.is_grad_enabled() or torch.is_autocast_enabled(first.device.type)
        return (general if needs_general else fast)(first, *others)

    return call
