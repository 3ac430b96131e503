"""The unit that logits are read in, and how branches become such units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refusion_lit.decoding.requests import Branch, Draw, Reading
from refusion_lit.noise import stable_key


@dataclass(slots=True)
class Span:
    """Places of one branch that are read alike.

    Attributes:
        reading: Where what is read goes.
        draw: How tokens are drawn.
        index: The places, as indices into the hidden states.
        given: The token at each place whose probability is wanted; ``None`` where tokens are drawn.
        noise_keys: Key of each place's noise, where there is any.
        guide: Distance to each place's logits that guide it.
        later: What is read ahead besides.
    """

    reading: Reading
    draw: Draw
    index: Sequence[int]
    given: Sequence[int] | None = None
    noise_keys: Sequence[int] = ()
    guide: int = 0
    later: Later | None = None


@dataclass(slots=True)
class Later:
    """Tokens of a branch that may be asked for later.

    Attributes:
        start: Place of the branch's first token.
        groups: Groups of offsets, see :class:`~refusion_lit.decoding.requests.Branch`.
        noise_keys: Key of the noise at each of these offsets, where there is any.
        num_prefetch: How many groups will probably be asked for.
        tokens: What was drawn ahead, by offset.
    """

    start: int
    groups: Sequence[Sequence[int]]
    noise_keys: Mapping[int, int]
    num_prefetch: int
    tokens: dict[int, int]


def add_spans(
    spans: list[Span],
    branches: Sequence[Branch],
    how: Draw,
    prompt_id: str,
    starts: Sequence[int],
    length: int,
    *,
    ahead: Sequence[dict[int, int]] | None = None,
    draft_at: Sequence[Sequence[int]] | None = None,
) -> list[Reading]:
    """Append the spans that one prompt's branches read.

    Args:
        spans: Appended to.
        branches: The branches.
        how: How tokens are drawn.
        prompt_id: Keys the noise.
        starts: Place of each branch's first token.
        length: Distance between two rows, for guidance.
        ahead: Where tokens of each branch go that are read ahead; ``None`` if none are.
        draft_at: Offsets in each branch that are read instead of those that it names itself.

    Returns:
        For each branch its reading, still empty.
    """
    readings = [Reading() for _ in branches]
    guide = 0 if how.guidance is None else length
    for number, (branch, reading, start) in enumerate(zip(branches, readings, starts, strict=True)):
        later, offsets = None, branch.draft_at if draft_at is None else draft_at[number]
        if ahead is not None and branch.prefetch_at and how.guidance is None:
            follow = [offset for group in branch.prefetch_at for offset in group]
            keys = dict(zip(follow, _noise_keys(branch, follow, how, prompt_id), strict=False))
            later = Later(start, branch.prefetch_at, keys, branch.num_prefetch, ahead[number])
        if offsets or later is not None:
            noise_keys = _noise_keys(branch, offsets, how, prompt_id)
            index = [start + at for at in offsets]
            spans.append(Span(reading, how, index, noise_keys=noise_keys, guide=guide, later=later))
        if branch.score_at and draft_at is None:
            places, given = zip(*branch.score_at, strict=True)
            spans.append(Span(reading, how, [start + at for at in places], given, guide=guide))
    return readings


def _noise_keys(branch: Branch, offsets: Sequence[int], how: Draw, prompt_id: str) -> Sequence[int]:
    """Return the key of the noise at each offset of a branch; none where nothing is random."""
    if how.sampling.temperature == 0:
        return ()
    seed, positions = how.sampling.seed, branch.positions
    return [stable_key("draw", seed, prompt_id, how.round, positions[offset] + how.shift) for offset in offsets]
