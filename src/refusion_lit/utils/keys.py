"""Random numbers that depend on keys alone: stable hashes of integers and strings, without torch."""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def stable_key(*parts: int | str) -> int:
    """Hash any mix of integers and strings to a signed 64-bit key, the same in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform_scalar(*parts: int | str) -> float:
    """Return one number in [0, 1) that depends on ``parts`` alone, for decisions made on the host."""
    return ((stable_key(*parts) & _MASK) >> 11) * 2.0**-53
