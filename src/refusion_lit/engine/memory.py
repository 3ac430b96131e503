"""Memory: prefixes that prompts share, the KV cache kept for the next call, and bounds on it and on positions.

Few-shot examples, system messages and instructions repeat. The common prefix of two prompts is computed for one of
them, and its KV cache entries are copied for the other. Rows of prompts in flight and rows of finished prompts serve as
the store, so sharing takes no extra memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from os.path import commonprefix

import torch

from refusion_lit.engine.decoder import Decoder
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.errors import is_out_of_memory
from refusion_lit.utils.require import require

MIN_SHARED = 64
"""Minimum number of tokens to share; shorter prefixes are recomputed: waiting one forward for them costs more."""

Tokens = tuple[int, ...]


def prefix_of(
    tokens: Tokens, held: Mapping[int, Tokens], pending: Mapping[int, Tokens], decoder: Decoder
) -> tuple[int, int] | None:
    """Find the longest prefix of a prompt that other prompts have in the cache.

    Args:
        tokens: The prompt.
        held: Prompts whose entries are computed, by row of the cache.
        pending: Prompts whose entries the next forward computes, by row.
        decoder: Determines how much of a common prefix may be shared.

    Returns:
        Number of tokens to share and the row that holds them; 0 and -1 if they are too few. ``None`` to wait, as a
        pending prompt will have at least ``MIN_SHARED`` tokens more.
    """
    num_shared, source = _longest(held, tokens, decoder)
    is_worth_waiting = _longest(pending, tokens, decoder)[0] >= num_shared + MIN_SHARED
    return None if is_worth_waiting else (num_shared, source)


def _longest(prompts: Mapping[int, Tokens], tokens: Tokens, decoder: Decoder) -> tuple[int, int]:
    """Return the largest number of tokens to share with one of the prompts, and its row; 0 and -1 if too few."""
    head = tokens[:MIN_SHARED]
    found = [
        (decoder.num_shareable(len(tokens), len(commonprefix([tokens, other]))), storage)  # noqa: RUF071 - no paths
        for storage, other in prompts.items()
        if other[:MIN_SHARED] == head
    ]
    best = max(found, key=itemgetter(0), default=(0, -1))
    return best if best[0] >= MIN_SHARED else (0, -1)


@dataclass
class KeptCache:
    """Keeps the cache of one call for the next: each turn of a conversation shares its prefix with the turns before.

    The next call must use the same model with the same weights. The memory of the last call's cache stays allocated.
    """

    _content: tuple[KVCache, Decoder, dict[int, Tokens], object] | None = None

    def take(self, decoder: Decoder, num_rows: int) -> tuple[KVCache, dict[int, Tokens]] | None:
        """Remove and return the kept cache and its prompts; ``None`` if it is unusable.

        It is usable if it has ``num_rows`` rows and was filled by the same decoder in the same torch modes. It is
        removed because an interrupted call leaves its entries undefined.
        """
        content = self._content
        self._content = None
        if content is None or content[1] != decoder or content[0].num_rows != num_rows or content[3] != _mode():
            return None
        return content[0], content[2]

    def put(self, cache: KVCache, decoder: Decoder, held: dict[int, Tokens]) -> None:
        """Keep a cache and the prompts that its rows hold."""
        self._content = cache, decoder, held, _mode()


def _mode() -> object:
    """Return the types of autocast, which a cache's tensors depend on."""
    kinds = ("cpu", "cuda")
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]


def check_bound(lengths: Sequence[tuple[int, str]], max_new_tokens: int, max_cache_tokens: int) -> None:
    """Refuse a bounded cache that does not hold the longest prompt and its response.

    Args:
        lengths: Number of tokens of each prompt, and its id.
        max_new_tokens: Maximum length of the response.
        max_cache_tokens: Maximum number of cache entries.

    Raises:
        ValueError: Naming the longest prompt.
    """
    length, longest = max(lengths, key=itemgetter(0), default=(0, ""))
    needed = length + max_new_tokens
    expected = f"at least {needed} (prompt {longest} of {length} tokens and max_new_tokens)"
    fix = "raise it, shorten the prompt or lower max_new_tokens"
    require(not lengths or max_cache_tokens >= needed, "max_cache_tokens", expected, max_cache_tokens, fix)


def check_canvas(model: LanguageModel, decoder: Decoder, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
    """Refuse blocks, slots or windows that reach beyond the last position that a model has learnt."""
    limit = model.max_positions
    fix = "shorten the prompt, lower max_new_tokens, or use smaller blocks or slots"
    for prompt in prompts:
        reach = len(prompt.token_ids) + len(decoder.begin(prompt, sampling, model.special_tokens).tokens)
        holds = limit is None or reach <= limit
        expected = f"whole blocks, slots or windows in {limit} positions, the model's context"
        require(holds, f"prompt {prompt.id}", expected, f"{reach} with {decoder}", fix)


def groups_within(
    prompts: Sequence[Prompt], max_new_tokens: int, num_rows: int, max_cache_tokens: int
) -> list[tuple[int, list[tuple[int, Prompt]]]]:
    """Group prompts by the number of rows that fit into a bounded cache.

    All rows of a cache have the length of the longest one. Long prompts therefore form groups of their own with fewer
    rows.

    Args:
        prompts: The prompts.
        max_new_tokens: Room for each response.
        num_rows: Maximum number of rows.
        max_cache_tokens: Maximum number of entries of all rows together; must hold the longest prompt and its response.

    Returns:
        Pairs of a number of rows, in descending order, and the prompts (with their places) that run with it.
    """
    groups: dict[int, list[tuple[int, Prompt]]] = {}
    for index, prompt in enumerate(prompts):
        length = len(prompt.token_ids) + prompt.num_uncounted + max_new_tokens
        fitting = max_cache_tokens // length
        fitting = num_rows if fitting >= num_rows else 1 << (fitting.bit_length() - 1)  # for few groups
        groups.setdefault(fitting, []).append((index, prompt))
    return sorted(groups.items(), reverse=True)


def explain_out_of_memory(error: BaseException, cache: KVCache) -> None:
    """Raise a ``ValueError`` that names the option if an error says that memory ran out."""
    if is_out_of_memory(error):
        used = f"{cache.num_rows} and no memory left (the cache takes {cache.num_bytes / 2**20:.0f} MB)"
        fix = "lower it, or set max_cache_tokens."
        raise ValueError(f"batch_size: expected prompts that fit into memory, got {used}; {fix}") from error
