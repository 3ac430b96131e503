"""Schedules prompts: decides who gets a cache row, which prefixes are shared, and which forwards run together.

Few-shot examples, system messages and instructions repeat. If two prompts share a prefix, it is computed for one
prompt, and its KV cache entries are copied for the other. The rows of running and finished prompts serve as the store,
so sharing takes no extra memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from os.path import commonprefix

from refusion_lit.engine.batch import measure_shape
from refusion_lit.engine.decoder import Decoder
from refusion_lit.engine.sequence import PromptSequence
from refusion_lit.types import Prompt

MIN_SHARED = 64
"""Minimum number of tokens to share; shorter prefixes are recomputed: waiting one forward for them costs more."""

Tokens = tuple[int, ...]


def admit(
    waiting: list[PromptSequence],
    running: Sequence[PromptSequence],
    cached_prompts: dict[int, Tokens],
    num_rows: int,
    decoder: Decoder | None,
) -> Iterator[tuple[PromptSequence, int, int]]:
    """Assign free cache rows to waiting prompts.

    A prompt waits if the next forward will compute entries that it can share, at least ``MIN_SHARED`` more than now.
    Later prompts then go first; at most ``num_rows`` prompts are held back.

    Args:
        waiting: Prompts without a row, in their order; admitted prompts are removed.
        running: Prompts in flight.
        cached_prompts: Prompts whose entries are computed, by row. A finished prompt's entries stay until its row is
            reused.
        num_rows: The cache's number of rows.
        decoder: Determines how many common tokens may be shared; ``None``: nothing is shared.

    Yields:
        A prompt, the number of entries to copy for its start, and the cache row to copy from: possibly the prompt's new
        row, or -1 if nothing is shared.
    """
    free = {*range(num_rows)} - {sequence.cache_row for sequence in running}
    pending = {sequence.cache_row: sequence.prompt.token_ids for sequence in running}
    pending = {row: tokens for row, tokens in pending.items() if row not in cached_prompts}
    delayed: list[PromptSequence] = []
    while waiting and free and len(delayed) < num_rows:
        sequence = waiting.pop(0)
        tokens = sequence.prompt.token_ids
        num_shared, source = 0, -1
        if decoder is not None:
            num_shared, source = _find_longest(cached_prompts, tokens, decoder)
            if _find_longest(pending, tokens, decoder)[0] >= num_shared + MIN_SHARED:
                delayed.append(sequence)
                continue
        # A free source row needs no copy. Otherwise prefer a row without a prompt, to keep sources for others.
        sequence.cache_row = source if source in free else min(free, key=lambda row: (row in cached_prompts, row))
        free.remove(sequence.cache_row)
        cached_prompts.pop(sequence.cache_row, None)
        pending[sequence.cache_row] = tokens  # until its first forward
        yield sequence, num_shared, source
    waiting[:0] = delayed


def _find_longest(prompts: Mapping[int, Tokens], tokens: Tokens, decoder: Decoder) -> tuple[int, int]:
    """Return the maximum number of tokens to share, and the row to share with; 0 and -1 if they are too few."""
    head = tokens[:MIN_SHARED]
    candidates = [
        (decoder.num_shareable(len(tokens), len(commonprefix([tokens, other]))), row)  # noqa: RUF071 - no paths
        for row, other in prompts.items()
        if other[:MIN_SHARED] == head
    ]
    best = max(candidates, key=itemgetter(0), default=(0, -1))
    return best if best[0] >= MIN_SHARED else (0, -1)


def fit_into_forward(sequences: Sequence[PromptSequence], max_tokens: int) -> list[PromptSequence]:
    """Return the prompt that has waited longest, and prompts that fit into the same bounded forward.

    Args:
        sequences: Prompts whose pending requests are forwards.
        max_tokens: Maximum number of positions in a call of the model, padding included.
    """
    chosen: set[int] = set()
    shapes: dict[tuple[bool, bool], tuple[int, int]] = {}
    for sequence in sorted(sequences, key=lambda sequence: (sequence.last_call, sequence.state.num_forwards)):
        kind = sequence.forward.kind
        num_rows, length = shapes.get(kind, (0, 0))
        more_rows, new_length = measure_shape(sequence.forward)
        num_rows, length = num_rows + more_rows, max(length, new_length)
        if num_rows * length <= max_tokens or not chosen:
            chosen.add(sequence.index)
            shapes[kind] = (num_rows, length)
    return [sequence for sequence in sequences if sequence.index in chosen]


def group_by_cache_size(
    prompts: Sequence[Prompt], max_new_tokens: int, num_rows: int, max_cache_tokens: int
) -> list[tuple[int, list[tuple[int, Prompt]]]]:
    """Group prompts by how many rows fit into a bounded cache.

    All cache rows are as long as the longest row. Long prompts therefore form separate groups with fewer rows.

    Args:
        prompts: The prompts.
        max_new_tokens: Room for a response.
        num_rows: Maximum number of rows.
        max_cache_tokens: Maximum number of entries of all rows together; at least the longest prompt and its response.

    Returns:
        Pairs: a number of rows, in descending order, and the prompts (with their indices) that run with it.
    """
    groups: dict[int, list[tuple[int, Prompt]]] = {}
    for index, prompt in enumerate(prompts):
        length = len(prompt.token_ids) + prompt.num_uncounted + max_new_tokens
        num_fitting = max_cache_tokens // length
        num_fitting = num_rows if num_fitting >= num_rows else 1 << (num_fitting.bit_length() - 1)  # for few groups
        groups.setdefault(num_fitting, []).append((index, prompt))
    return sorted(groups.items(), reverse=True)
