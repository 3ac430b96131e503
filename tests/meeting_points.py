"""Where the host would wait for the device, found on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"}


class MeetingPoints(TorchDispatchMode):
    """Collects operations for which the host would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_booleans = name in ("index", "index_put", "index_put_") and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]
        )
        if by_booleans or name in _NAMES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
