"""Steps that the slow reference decoders of several tests share, written without the package's code."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor


def best_allowed(logits: Tensor, banned: Iterable[int], vocab_size: int) -> int:
    """Return the most probable token below ``vocab_size`` that is not banned, given one place's logits."""
    allowed = logits.clone()
    allowed[[token for token in banned if token < len(logits)]] = -torch.inf
    allowed[vocab_size:] = -torch.inf
    return int(allowed.argmax())


def cut(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens up to the first end of sequence, that one included."""
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    return tokens if end is None else tokens[: end + 1]
