"""A simulated accelerator, to test on a CPU what a GPU would refuse or wait for.

Its tensors live in this process, but torch sees them on another device. Operations that mix devices fail, and copies
between host and device are counted. The device is MAIA: torch knows its name, and nothing has to be initialised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SHADOW = torch.device("maia", 0)
_TO_HOST, _WAITING, _SENT = "device to host", "host to device, waiting", "host to device"
# Operations whose result, or its size, the host must read.
_ALWAYS_WAIT = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
# Methods that look for the device's own code before torch dispatches.
_GUARDED = (Tensor.__getitem__, Tensor.__setitem__, Tensor.__invert__, Tensor.contiguous, Tensor.new_tensor)


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, ShadowTensor) else value


class ShadowTensor(Tensor):
    """A tensor on the simulated device; ``plain`` has its values."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> ShadowTensor:
        made = Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), storage_offset=plain.storage_offset(), dtype=plain.dtype,
            device=SHADOW, requires_grad=plain.requires_grad,
        )  # fmt: skip
        made.plain = plain
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _GUARDED:
            with torch._C.DisableTorchFunctionSubclass():  # else a copy on the host would be a ShadowTensor, too
                return func(*args, **(kwargs or {}))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            for index in indices:
                assert not isinstance(index, list), "the host waits until a list of indices is copied"
                if isinstance(index, Tensor):
                    assert isinstance(index, ShadowTensor), "the index is on another device"
                    assert index.dtype != torch.bool, "the host waits for the number of true entries"
        output = func(*tree_map(_plain, args), **tree_map(_plain, dict(kwargs or {})))
        return ShadowTensor(output) if isinstance(output, Tensor) else output

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {}, Counter())


class ShadowDevice(TorchDispatchMode):
    """Makes the device usable within a ``with`` block.

    Attributes:
        meetings: Number of copies and waits between host and device, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meetings: Counter[str] = Counter()

    @property
    def num_waits(self) -> int:
        """Number of times that the host had to wait for the device."""
        return sum(count for kind, count in self.meetings.items() if kind != _SENT)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {}, self.meetings)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], meetings: Counter[str]) -> Any:
    """Run an operation on the plain tensors, count its copies and waits, and return tensors on the right device."""
    name = func.name()
    if name == "aten::_fused_sdp_choice":
        return 0  # composed of plain operations
    leaves = tree_leaves((args, kwargs))
    shadows = [value for value in leaves if isinstance(value, ShadowTensor)]
    others = [value for value in leaves if isinstance(value, Tensor) and not isinstance(value, ShadowTensor)]
    options, target = dict(kwargs), None
    if options.get("device") is not None:
        target, options["device"] = torch.device(options["device"]).type, torch.device("cpu")
    if name == "aten::_to_copy":
        if shadows and target == "cpu":
            meetings[_TO_HOST] += 1
        elif others and target == SHADOW.type:
            meetings[_SENT if kwargs.get("non_blocking") else _WAITING] += 1
    elif shadows:
        assert all(other.ndim == 0 for other in others), f"{name} mixes devices"
        if name in _ALWAYS_WAIT:
            meetings[name] += 1
    output = func(*tree_map(_plain, args), **tree_map(_plain, options))
    is_on_device = bool(shadows) if target is None else target == SHADOW.type
    return tree_map(partial(_make_shadow, shadows), output) if is_on_device else output


def _make_shadow(inputs: Sequence[ShadowTensor], value: Any) -> Any:
    """Return a tensor's shadow. An operation in place returns an input, whose shadow exists."""
    if not isinstance(value, Tensor):
        return value
    same = [shadow for shadow in inputs if shadow.plain is value]
    return same[0] if same else ShadowTensor(value)
