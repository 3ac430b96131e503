"""The KV cache that one call keeps for the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refusion_lit.engine.decoder import Decoder
from refusion_lit.modeling.kv_cache import KVCache


@dataclass
class KeptCache:
    """Keeps the cache for the next call, so that a conversation's turns share prefixes with earlier turns.

    The next call must use the same model with the same weights. The cache's memory stays allocated.
    """

    _content: tuple[KVCache, Decoder, dict[int, tuple[int, ...]], object] | None = None

    def take(self, decoder: Decoder, num_rows: int) -> tuple[KVCache, dict[int, tuple[int, ...]]] | None:
        """Remove and return the kept cache and its prompts by row; ``None`` if the cache is unusable.

        The cache is usable if it has ``num_rows`` rows and was filled by the same decoder in the same torch modes. The
        cache is removed, because an interrupted call leaves undefined entries.
        """
        content = self._content
        self._content = None
        if content is None or content[1] != decoder or content[0].num_rows != num_rows or content[3] != _autocast():
            return None
        return content[0], content[2]

    def put(self, cache: KVCache, decoder: Decoder, cached_prompts: dict[int, tuple[int, ...]]) -> None:
        """Keep a cache and the prompts that its rows contain."""
        self._content = cache, decoder, cached_prompts, _autocast()


def _autocast() -> object:
    """Return autocast's types, on which a cache's tensors depend."""
    kinds = ("cpu", "cuda")
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]
