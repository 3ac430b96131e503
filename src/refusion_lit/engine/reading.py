"""Reads tokens and probabilities from hidden states, with one device-to-host transfer for all rows of a call.

The steps are: gather hidden states, compute logits at the requested positions only, draw, transfer, scatter. Greedy
draws without further options are drawn here, all others in :mod:`~refusion_lit.engine.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from refusion_lit.engine.requests import Draw, Proposal, Read
from refusion_lit.engine.sampling import Drawn, General, lowered
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
        self._vocab_size = self._special.vocab_size
        self._banned = frozenset(self._special.banned_token_ids)
        self._ids_on_device: dict[tuple[int, ...], Tensor] = {}

    def read(self, hidden: Shaped[Tensor, "position hidden"], reads: Sequence[Read]) -> None:
        """Fill the readings of ``reads``; the only point of a forward where the host waits for the device."""
        groups: dict[tuple[object, ...], list[Read]] = {}
        for read in reads:
            if read.branch.draft_at or read.branch.score_at:
                groups.setdefault(_kind(read), []).append(read)
        waiting = [(group, self._draw(hidden, group)) for group in groups.values()]
        if not waiting:
            return
        for (group, drawn), numbers in zip(waiting, _transferred([drawn for _, drawn in waiting]), strict=True):
            _fill(group, *numbers, drawn.distributions, every=self._all_probabilities)

    def _draw(self, hidden: Shaped[Tensor, "position hidden"], group: Sequence[Read]) -> Drawn:
        """Queue all work of reads that draw in the same way: drafts first, then given tokens, in chunks."""
        draw = group[0].draw
        index = [read.start + offset for read in group for offset in read.branch.draft_at]
        num_drafts = len(index)
        index += [read.start + offset for read in group for offset, _ in read.branch.score_at]
        given = [token for read in group for _, token in read.branch.score_at]
        is_scored = self._all_probabilities or bool(given) or any(read.draw.with_probability for read in group)
        sent = to_device([*index, *given], hidden.device)
        is_greedy = _is_plain(draw) and not (group[0].spans_end or group[0].allowed)  # the fast path
        general = None if is_greedy else General(group, self._special, self._banned, hidden.device)
        drawn = Drawn()
        at = 0
        positions, scored = sent.split_with_sizes((len(index), len(given)))
        for logits in self._logit_chunks(hidden, draw, positions, group[0].guide):
            size = logits.shape[0]
            num_own = min(max(num_drafts - at, 0), size)
            chosen = []
            if num_own:
                own = logits if num_own == size else logits[:num_own]
                tokens = self._greedy(own, draw, restore=is_scored) if general is None else general.draw(own, at, drawn)
                drawn.tokens.append(tokens)
                chosen.append(tokens)
            if num_own < size:
                chosen.append(scored.narrow(0, at + num_own - num_drafts, size - num_own))
            if draw.confidence_forbidden:
                logits.index_fill_(-1, to_device(draw.confidence_forbidden, logits.device), -math.inf)
            if is_scored:
                dtype = draw.confidence_dtype
                logits = logits.softmax(-1) if dtype is None else lowered(logits, dtype).softmax(-1).to(logits.dtype)
            drawn.values.append(logits.gather(-1, joined(chosen).unsqueeze(-1)).squeeze(-1))
            at += size
        return drawn

    def _logit_chunks(
        self, hidden: Tensor, draw: Draw, rows: Int[Tensor, " position"], guide: int
    ) -> Iterator[Float[Tensor, "position vocab"]]:
        """Yield logits in chunks: bounds the head's memory and, on CPUs, keeps the softmax in the processor's cache."""
        for some in _split(rows, max(1, _MAX_LOGITS // self._vocab_size)):
            logits = self._logits(hidden, some)
            if draw.guidance is not None:
                unconditional = self._logits(hidden, some + guide)
                logits = _finite(unconditional + (draw.guidance + 1.0) * (logits - unconditional))
            is_cached = logits.device.type == "cpu"
            yield from _split(logits, max(1, _MAX_SOFTMAX // logits.shape[1])) if is_cached else (logits,)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return finite logits in float32 or higher precision, in a tensor that may be changed in place."""
        logits = self._head(hidden.index_select(0, rows))
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return _finite(logits)

    def _greedy(self, logits: Float[Tensor, "draft vocab"], draw: Draw, *, restore: bool) -> Int[Tensor, " draft"]:
        """Return the most probable tokens; ``restore`` the logits that are changed meanwhile."""
        banned = self._ids_on_device.get(draw.forbidden)
        if banned is None:
            banned = to_device(sorted(self._banned.union(draw.forbidden)), logits.device)
            self._ids_on_device[draw.forbidden] = banned
        kept = logits.index_select(-1, banned) if restore else None
        tokens = first_argmax(logits.index_fill_(-1, banned, -math.inf).narrow(-1, 0, self._vocab_size))
        if kept is not None:  # probabilities are over all ids
            logits.index_copy_(-1, banned, kept)
        return tokens


def _is_plain(draw: Draw) -> bool:
    """Whether a draw is a greedy choice without guidance and extra figures: the fast path."""
    is_bare = draw.guidance is None and not (draw.confidence_forbidden or draw.statistic or draw.confidence_dtype)
    return is_bare and draw.sampling.temperature == 0


def _kind(read: Read) -> tuple[object, ...]:
    """Return the key of a read: reads with equal keys draw in the same way."""
    draw = read.draw
    sampling = draw.sampling
    own = (draw.forbidden, read.guide, bool(read.branch.proposals), bool(read.spans_end or read.allowed))
    if _is_plain(draw):
        return own
    return (*own, sampling.temperature, sampling.top_p, sampling.top_k, draw.guidance, draw.confidence_forbidden,
            draw.statistic, draw.top_p_first, draw.confidence_dtype, draw.proposes)  # fmt: skip


def _finite(logits: Tensor) -> Tensor:
    """Replace NaN by the lowest number and clamp infinities, in place; -inf stays free to mark ids that are banned."""
    lowest = torch.finfo(logits.dtype).min
    highest = torch.finfo(logits.dtype).max
    return logits.nan_to_num_(nan=lowest, posinf=highest, neginf=lowest)


def _transferred(drawn: Sequence[Drawn]) -> list[tuple[list[int], list[float], list[float]]]:
    """Return each group's tokens, values and statistics as numbers, with one transfer from an accelerator."""
    parts = [part for group in drawn for part in (group.tokens, group.values, group.statistics)]
    tensors = [joined(part) for part in parts if part]
    if tensors[0].device.type != "cpu":
        # float64 holds ids exactly.
        flat = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
        split = flat.split([tensor.numel() for tensor in tensors])
        tensors = [own.to(tensor.dtype).view(tensor.shape) for own, tensor in zip(split, tensors, strict=True)]
    present = iter(tensors)
    numbers = iter([next(present).tolist() if part else [] for part in parts])
    return list(zip(numbers, numbers, numbers, strict=True))


def _fill(
    group: Sequence[Read], tokens: list[int], values: list[float], statistics: list[float],
    distributions: Sequence[Tensor], *, every: bool,
) -> None:  # fmt: skip
    """Scatter a group's numbers to its readings."""
    drafts, figures, distributed = iter(tokens), iter(statistics), iter(distributions)
    of_drafts, scores = iter(values), iter(values[len(tokens) :])
    for read in group:
        reading = read.reading
        num = len(read.branch.draft_at)
        reading.tokens = [*islice(drafts, num)]
        probabilities = [*islice(of_drafts, num)]
        if every or read.draw.with_probability:
            reading.probabilities = probabilities
        reading.statistic = [*islice(figures, num)]
        reading.proposals = [*map(Proposal, reading.tokens, distributed)]
        reading.scores = [*islice(scores, len(read.branch.score_at))]


def joined(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """Return tensors one after the other along an axis; a single one as it is."""
    return torch.cat([*parts], dim) if len(parts) > 1 else parts[0]


def _split(values: Tensor, size: int) -> Sequence[Tensor]:
    return values.split(size) if size < values.shape[0] else (values,)
