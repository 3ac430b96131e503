"""What decoders share: branches of the text so far, what is read at once, and how many recent drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.requests import Branch

FEW_POSITIONS = 16
"""Up to this many positions, a CPU computes logits hardly slower than for one: reading the LM head's weights dominates.
So masks that may not be needed are read together with everything else."""


@dataclass(slots=True)
class Acceptance:
    """Counts of recent drafts.

    Attributes:
        num_tested: Drafts compared with the model's own token.
        num_accepted: Those that were equal to it.
        num_assumed: Drafts that are counted beside them, half of them as accepted.
        half_life: After this many tokens a draft counts half: a text is easy to draft here and hard there.
    """

    num_tested: float = 0.0
    num_accepted: float = 0.0
    num_assumed: float = 4.0
    half_life: float = 16.0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft is accepted: the mean of the recent ones, and one half without any."""
        return (self.num_accepted + self.num_assumed / 2) / (self.num_tested + self.num_assumed)

    def count(self, num_tokens: int, num_tested: int = 0, num_accepted: int = 0) -> None:
        """Count the drafts of a forward; earlier ones count less and less, so that drafting is tried again."""
        decay = 0.5 ** (num_tokens / self.half_life)
        self.num_tested = decay * (self.num_tested + num_tested)
        self.num_accepted = decay * (self.num_accepted + num_accepted)


def text_branch(
    state: RowState, start: int, stop: int, predicted: Sequence[int], *, order: Sequence[int] | None = None,
    shift: int = 0,
) -> Branch:  # fmt: skip
    """Return the text at positions ``start`` to ``stop`` after everything cached before it.

    Args:
        state: The prompt's state.
        start: First position.
        stop: Position after the last one.
        predicted: Positions whose tokens are drawn.
        order: Order of each token; a token sees tokens of the same or a lower order. ``None``: causal.
        shift: Predicted position minus the position whose logits are read.
    """
    return Branch(
        tokens=text_between(state, start, stop),
        positions=range(start, stop),
        order=order,
        visible=((0, start),),
        write_at=start,
        shift=shift,
        draft_at=[position - shift - start for position in predicted],
    )


def text_between(state: RowState, start: int, stop: int) -> list[int]:
    """Return the input at positions ``start`` to ``stop``: prompt, final tokens, and masks elsewhere."""
    places = range(max(start - state.prompt_length, 0), stop - state.prompt_length)
    canvas = [state.mask_token_id if state.is_masked[place] else state.tokens[place] for place in places]
    return [*state.prompt.token_ids[start:stop], *canvas]


def masked_in(state: RowState, start: int, stop: int) -> list[int]:
    """Return the masked positions from ``start`` to ``stop``."""
    return [p for p in range(max(start, state.prompt_length), stop) if state.is_masked[p - state.prompt_length]]


def uncached(state: RowState) -> list[tuple[int, int]]:
    """Return tokens and positions that the next forward stores: what is known, then what each forward committed."""
    if state.num_forwards == 0:
        return state.known[state.num_cached :]
    num_stored = state.num_cached - state.prompt_length - state.prompt.num_given
    return [(state.tokens[place], state.prompt_length + place) for place in state.committed[num_stored:]]


def up_to_eos(state: RowState, tokens: Sequence[int]) -> Sequence[int]:
    """Return tokens up to their first EOS token."""
    eos = state.first_eos(tokens)
    return tokens if eos is None else tokens[: eos + 1]


def rounds_since(state: RowState, stop: int) -> int:
    """Return the number of forwards since the last commit at a place before ``stop``."""
    return state.num_forwards - max(state.commit_rounds[:stop], default=0)
