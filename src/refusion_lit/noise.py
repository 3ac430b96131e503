"""Random numbers that depend on keys alone, never on the order in which they are drawn.

Training noise depends on (seed, epoch, sample id), decoding noise on (seed, prompt id, round, position). So batching,
order, workers, processes and resuming change nothing. torch's generators are sequential, so a vectorised counter-based
generator is needed: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) on int64 tensors, identical on every device.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def stable_key(*parts: int | str) -> int:
    """Hash integers and strings to a signed 64-bit key, the same in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform_scalar(*parts: int | str) -> float:
    """Return a number in [0, 1) that depends on ``parts`` alone, for decisions on the host."""
    return (stable_key(*parts) % 2**64 >> 11) * 2.0**-53


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's ``>>`` on int64 copies the sign bit."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix(values: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    values = (values ^ _shift_right(values, 30)) * _MIX_1
    values = (values ^ _shift_right(values, 27)) * _MIX_2
    return values ^ _shift_right(values, 31)


class KeyedNoise:
    """Uniform numbers for a batch of keys.

    Args:
        keys: A signed 64-bit key per row, from :func:`stable_key`.

    Examples:
        >>> keys = torch.tensor([stable_key("sample 1"), stable_key("sample 2")])
        >>> noise = KeyedNoise.for_samples(keys, seed=0, epoch=0)
        >>> alone = KeyedNoise.for_samples(keys[1:], seed=0, epoch=0)
        >>> bool((noise.uniform("mask", 4)[1] == alone.uniform("mask", 4)[0]).all())  # independent of the batch
        True
    """

    def __init__(self, keys: Int[Tensor, " batch"]) -> None:
        self._keys = keys

    @classmethod
    def for_samples(cls, sample_keys: Int[Tensor, " batch"], *, seed: int, epoch: int) -> KeyedNoise:
        """Return a batch's training noise, which depends on seed, epoch and the samples' keys."""
        return cls(_mix(sample_keys + stable_key("training", seed, epoch)))

    def uniform(self, stream: str, size: int) -> Float[Tensor, "batch size"]:
        """Return float64 numbers in [0, 1), independent between rows, streams and indices.

        Args:
            stream: Name for the use of the numbers; another name gives independent numbers.
            size: Number of values per row. Value ``i`` does not depend on ``size``.
        """
        return self.bits(stream, size).double() * 2.0**-53

    def bits(self, stream: str, size: int) -> Int[Tensor, "batch size"]:
        """Return integers in [0, 2**53); for arguments see :meth:`uniform`."""
        keys = _mix(self._keys + stable_key("stream", stream))
        counter = torch.arange(1, size + 1, device=keys.device, dtype=torch.int64)
        return _shift_right(_mix(keys[:, None] + counter * _GAMMA), 11)
