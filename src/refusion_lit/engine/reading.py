"""Reads tokens and probabilities from hidden states, with one device-to-host transfer for all rows of a call.

The steps are: gather hidden states, compute logits at the requested positions only, draw, transfer, scatter. Greedy
draws without further options are drawn here, all others in :mod:`~refusion_lit.engine.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, islice

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from refusion_lit.engine.requests import Read
from refusion_lit.engine.sampling import Drawn, General, fill_general, general_key
from refusion_lit.modeling.devices import first_argmax, to_device
from refusion_lit.modeling.interface import LanguageModel

_MAX_LOGITS = 1 << 26
"""Maximum number of logits in memory at once (256 MB in float32); more positions are read in chunks."""

_MAX_SOFTMAX = 1 << 20
"""Logits per softmax on CPUs: small enough to stay in the processor's cache (benchmarks/fast_paths.py)."""


class Reader:
    """Fills readings from hidden states.

    Args:
        model: The model, whose head computes the logits.
        all_probabilities: Read the probabilities of all drafts, requested or not (for traces).
    """

    def __init__(self, model: LanguageModel, *, all_probabilities: bool = False) -> None:
        self._head = model.head_runner()
        self._special = model.special_tokens
        self._all_probabilities = all_probabilities
        ids = self._special.banned_token_ids
        # Sends the ids below the vocabulary's size that are not drawn to a device once, with a draw's own ones.
        self._banned = cache(lambda forbidden, device: to_device(sorted({*ids, *forbidden}), device))

    def read(self, hidden: Shaped[Tensor, "position hidden"], reads: Sequence[Read]) -> None:
        """Fill the readings of ``reads``; the only point of a forward where the host waits for the device."""
        groups: dict[object, list[Read]] = {}
        for read in reads:
            if read.branch.draft_at or read.branch.score_at:
                key = read.draw.forbidden if _is_plain(read) else general_key(read)
                groups.setdefault(key, []).append(read)
        if not groups:
            return
        drawn = [self._draw(hidden, group) for group in groups.values()]
        parts = [part for each in drawn for part in (*each.tokens, *each.values, *each.statistics)]
        if hidden.device.type != "cpu":  # one transfer, as their widest type: float32 holds ids below 2**24 exactly
            parts = [torch.cat(parts)]
        numbers = chain.from_iterable(part.tolist() for part in parts)
        for group, each in zip(groups.values(), drawn, strict=True):
            for read in group:
                read.reading.tokens = [*map(int, islice(numbers, len(read.branch.draft_at)))]
            if each.values:
                for read in group:
                    probabilities = [*islice(numbers, len(read.branch.draft_at))]
                    if self._all_probabilities or read.draw.with_probability:
                        read.reading.probabilities = probabilities
                for read in group:
                    read.reading.scores = [*islice(numbers, len(read.branch.score_at))]
            if not _is_plain(group[0]):
                fill_general(group, each, numbers)

    def _draw(self, hidden: Shaped[Tensor, "position hidden"], group: Sequence[Read]) -> Drawn:
        """Queue all work of reads that draw in the same way: drafts first, then given tokens, in chunks."""
        index = [read.start + offset for read in group for offset in read.branch.draft_at]
        num_drafts = len(index)
        index += [read.start + offset for read in group for offset, _ in read.branch.score_at]
        given = [token for read in group for _, token in read.branch.score_at]
        is_scored = self._all_probabilities or bool(given) or any(read.draw.with_probability for read in group)
        positions, scored = to_device([*index, *given], hidden.device).split_with_sizes((len(index), len(given)))
        banned = self._banned(group[0].draw.forbidden, hidden.device)
        general = None if _is_plain(group[0]) else General(group, self._special, banned)
        drawn = Drawn()
        at = 0
        for logits in self._logit_chunks(hidden, positions, group[0]):
            stop = at + len(logits)
            chosen = []
            if at < num_drafts:
                own = logits if stop <= num_drafts else logits[: num_drafts - at]
                tokens = (
                    self._greedy(own, banned, restore=is_scored) if general is None else general.draw(own, at, drawn)
                )
                drawn.tokens.append(tokens)
                chosen.append(tokens)
            if stop > num_drafts:
                chosen.append(scored[max(at - num_drafts, 0) : stop - num_drafts])
            if is_scored:
                probabilities = logits.softmax(-1) if general is None else general.probabilities(logits)
                ids = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
                drawn.values.append(probabilities.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
            at = stop
        return drawn

    def _logit_chunks(
        self, hidden: Tensor, rows: Int[Tensor, " position"], read: Read
    ) -> Iterator[Float[Tensor, "position vocab"]]:
        """Yield logits in chunks: bounds the head's memory and, on CPUs, keeps the softmax in the processor's cache."""
        guidance = read.draw.guidance
        for some in _split(rows, max(1, _MAX_LOGITS // self._special.vocab_size)):
            logits = self._logits(hidden, some)
            if guidance is not None:
                unconditional = self._logits(hidden, some + read.guide)
                logits = _finite(unconditional + (guidance + 1.0) * (logits - unconditional))
            is_cached = logits.device.type == "cpu"
            yield from _split(logits, max(1, _MAX_SOFTMAX // logits.shape[1])) if is_cached else (logits,)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return finite logits in float32 or higher precision, in a tensor that may be changed in place."""
        logits = self._head(hidden.index_select(0, rows))
        return _finite(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits)

    def _greedy(self, logits: Float[Tensor, "draft vocab"], banned: Tensor, *, restore: bool) -> Int[Tensor, " draft"]:
        """Return the most probable tokens; ``restore`` the logits that are changed meanwhile."""
        kept = logits.index_select(-1, banned) if restore else None
        tokens = first_argmax(logits.index_fill_(-1, banned, -math.inf).narrow(-1, 0, self._special.vocab_size))
        if kept is not None:  # probabilities are over all ids
            logits.index_copy_(-1, banned, kept)
        return tokens


def _is_plain(read: Read) -> bool:
    """Whether a read is a greedy choice without guidance, extra figures, template and constraint: the fast path."""
    draw = read.draw
    is_bare = draw.guidance is None and not (draw.confidence_forbidden or draw.statistic or draw.confidence_dtype)
    is_free = read.constraint is None and None not in read.prompt.given
    return is_bare and is_free and draw.sampling.temperature == 0


def _finite(logits: Tensor) -> Tensor:
    """Replace NaN by the lowest number and clamp infinities, in place; -inf stays free to mark ids that are banned."""
    return logits.nan_to_num_(nan=torch.finfo(logits.dtype).min)


def _split(values: Tensor, size: int) -> Sequence[Tensor]:
    """Return chunks of at most ``size`` rows; most calls have a single one, which is not worth torch's function."""
    return values.split(size) if len(values) > size else (values,)
