"""Random numbers and permutations that depend on keys alone: stable hashes of integers and strings, without torch."""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1
_NUM_FEISTEL_ROUNDS = 4


def stable_key(*parts: int | str) -> int:
    """Hash any mix of integers and strings to a signed 64-bit key, the same in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform_scalar(*parts: int | str) -> float:
    """Return one number in [0, 1) that depends on ``parts`` alone, for decisions made on the host."""
    return ((stable_key(*parts) & _MASK) >> 11) * 2.0**-53


def permute(index: int, size: int, seed: str) -> int:
    """Return the image of an index under a seeded permutation of ``range(size)``.

    A Feistel network (Luby and Rackoff, SIAM J. Comput. 1988) permutes the numbers with an even number of bits. Images
    outside the range are permuted again until one is inside (cycle walking; Black and Rogaway, CT-RSA 2002). Time and
    memory do not grow with ``size``.

    Args:
        index: Index in ``range(size)``.
        size: From 1 to 2**1024.
        seed: Selects the permutation.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    value = index
    while True:
        left = value >> half
        right = value & mask
        for number in range(_NUM_FEISTEL_ROUNDS):
            digest = hashlib.blake2b(f"{seed}:{number}:{right:x}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        value = left << half | right
        if value < size:
            return value
