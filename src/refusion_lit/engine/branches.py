"""Helpers for decoders: branches that feed text, and the acceptance rate of recent drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.requests import Branch, Proposal

FEW_POSITIONS = 16
"""Number of positions for which a CPU computes logits hardly slower than for one position, because reading the LM
head's weights dominates. So few masks are read together, even if some may not be needed."""


@dataclass(kw_only=True)
class DraftState(RowState):
    """State of decoders that verify drafts.

    Attributes:
        drafts: Drafts of the tokens after the committed tokens.
        proposals: The drafts with their distributions, for rejection sampling.
    """

    drafts: list[int] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)


@dataclass(slots=True)
class Acceptance:
    """Counts of recent drafts.

    Attributes:
        num_tested: Drafts compared with the model's own token.
        num_accepted: Drafts that were equal to the model's own token.
        num_assumed: A prior: additional drafts, half accepted.
        half_life: Number of tokens after which a draft counts half, because some parts of a text are easier to draft.
    """

    num_tested: float = 0.0
    num_accepted: float = 0.0
    num_assumed: float = 4.0
    half_life: float = 16.0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft is accepted: the mean of recent drafts, and 0.5 without any."""
        return (self.num_accepted + self.num_assumed / 2) / (self.num_tested + self.num_assumed)

    def count(self, num_tokens: int, num_tested: int = 0, num_accepted: int = 0) -> None:
        """Count a forward's drafts. Earlier drafts lose weight, so that drafting is tried again."""
        decay = 0.5 ** (num_tokens / self.half_life)
        self.num_tested = decay * (self.num_tested + num_tested)
        self.num_accepted = decay * (self.num_accepted + num_accepted)


def branch_after(start: int, tokens: Sequence[int], **options: Any) -> Branch:  # noqa: ANN401 - fields of Branch
    """Return a branch with tokens at the positions from ``start`` on; they see all cache entries before ``start``.

    Args:
        start: Number of tokens in the cache, in text order.
        tokens: The tokens.
        options: Further fields of :class:`~refusion_lit.engine.requests.Branch`.
    """
    positions = range(start, start + len(tokens))
    return Branch(tokens=tokens, positions=positions, visible=((0, start),), write_at=start, **options)


def text_branch(
    state: RowState, start: int, stop: int, predicted: Sequence[int], *, order: Sequence[int] | None = None,
    shift: int = 0,
) -> Branch:  # fmt: skip
    """Return a branch with the text at positions ``start`` to ``stop``; it sees all cache entries before ``start``.

    Args:
        state: The prompt's state.
        start: First position.
        stop: Position after the last.
        predicted: Positions whose tokens are drawn.
        order: As in :class:`~refusion_lit.engine.requests.Branch`.
        shift: Predicted position minus the logits' position.
    """
    offsets = [position - shift - start for position in predicted]
    return branch_after(start, text_between(state, start, stop), order=order, shift=shift, draft_at=offsets)


def text_between(state: RowState, start: int, stop: int) -> list[int]:
    """Return the input at positions ``start`` to ``stop``: prompt, final tokens, and masks elsewhere."""
    places = range(max(start - state.prompt_length, 0), stop - state.prompt_length)
    canvas = [state.mask_token_id if state.is_masked[place] else state.tokens[place] for place in places]
    return [*state.prompt.token_ids[start:stop], *canvas]


def list_masked(state: RowState, start: int, stop: int) -> list[int]:
    """Return the masked positions from ``start`` to ``stop``."""
    return [p for p in range(max(start, state.prompt_length), stop) if state.is_masked[p - state.prompt_length]]


def list_uncached(state: RowState) -> list[tuple[int, int]]:
    """Return tokens and positions to feed next: known tokens at first, later the newly committed tokens."""
    if state.num_forwards == 0:
        return state.known_tokens[state.num_cached :]
    num_stored = state.num_cached - state.prompt_length - state.prompt.num_given
    return [(state.tokens[place], state.prompt_length + place) for place in state.committed[num_stored:]]


def up_to_eos(state: RowState, tokens: Sequence[int]) -> Sequence[int]:
    """Return tokens up to their first EOS token."""
    eos = state.first_eos(tokens)
    return tokens if eos is None else tokens[: eos + 1]


def rounds_since(state: RowState, stop: int) -> int:
    """Return how many forwards ran since the last commit at a place before ``stop``."""
    return state.num_forwards - max(state.commit_rounds[:stop], default=0)
