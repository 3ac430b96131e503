"""What happened to every place of the text, forward by forward.

A trace says which drafts a forward made and which places became final. From this, and from nothing that depends on
the decoder, follows what became of each draft:

- **accepted**: the next thing that happens at its place is that the place becomes final;
- **rejected**: its place is drafted again. It counts as rejected from the forward that judged it on: the first one
  from its own that made places final or gave scores, but its own only if that gave no scores, because scores judge
  earlier drafts;
- **left**: nothing happens at its place any more (it lies behind the end of the response).

A draft at a place that was drafted before is a **re-planned** one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from refusion_lit.decoding.output import TraceRound
from refusion_lit.traces.document import Trace

Status = Literal["drafted", "rejected", "accepted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A place looks different from this forward on.

    Attributes:
        place: Index into the canvas (position minus prompt length).
        token: The token that it shows; ``None`` where it became final and nothing tells its token.
        probability: The token's probability when it was drafted; ``None`` if it never was.
        status: What the token is from now on.
        num_drafts: How often the place was drafted so far; above 1 it was re-planned.
    """

    place: int
    token: int | None
    probability: float | None
    status: Status
    num_drafts: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All changes of a decode.

    Attributes:
        changes: For every forward what it changed, in text order, at most once a place.
        num_places: Length of the canvas.
    """

    changes: tuple[tuple[Change, ...], ...]
    num_places: int

    def final(self) -> list[Change | None]:
        """Return how every place looks in the end; ``None`` where nothing happened."""
        return self.after(len(self.changes))

    def after(self, num_forwards: int) -> list[Change | None]:
        """Return how every place looks after so many forwards."""
        places: list[Change | None] = [None] * self.num_places
        for changes in self.changes[:num_forwards]:
            for change in changes:
                places[change.place] = change
        return places

    def final_forwards(self) -> list[int]:
        """Return for every place the number of the forward, from 1, that made it final; 0 for none."""
        forwards = [0] * self.num_places
        for number, changes in enumerate(self.changes, start=1):
            for change in changes:
                if change.status == "accepted":
                    forwards[change.place] = number
        return forwards


@dataclass
class _Draft:
    token: int
    probability: float
    forward: int
    number: int


def timeline(trace: Trace) -> Timeline:
    """Work out what happened to every place."""
    num_places = trace.canvas_length
    by_forward: list[dict[int, Change]] = [{} for _ in trace.rounds]
    drafts: list[list[_Draft]] = [[] for _ in range(num_places)]
    accepted_at: dict[int, int] = {}
    for number, entry in enumerate(trace.rounds):
        for position, token, probability in zip(entry.positions, entry.tokens, entry.probabilities, strict=True):
            place = position - trace.prompt_length
            if place in accepted_at:
                continue  # a forward may well compute what is final already
            known = drafts[place]
            if known and known[-1].forward == number:  # drafted twice in a forward: the later one counts
                known.pop()
            known.append(_Draft(token, probability, number, len(known) + 1))
        for position in entry.accepted:
            accepted_at.setdefault(position - trace.prompt_length, number)
    next_judgement = _judgements(trace.rounds)
    for place, known in enumerate(drafts):
        for draft, following in zip_longest(known, known[1:]):
            change = Change(
                place=place,
                token=draft.token,
                probability=draft.probability,
                status="drafted",
                num_drafts=draft.number,
            )
            by_forward[draft.forward][place] = change
            if following is None:
                continue
            own_judges = not trace.rounds[draft.forward].scores
            judged = next_judgement[draft.forward if own_judges else draft.forward + 1]
            if judged < following.forward:
                by_forward[judged][place] = _rejected(change)
    for place, number in accepted_at.items():
        by_forward[number][place] = _accepted(trace, place, drafts[place])
    return Timeline(
        changes=tuple(tuple(changes[place] for place in sorted(changes)) for changes in by_forward),
        num_places=num_places,
    )


def _judgements(rounds: Sequence[TraceRound]) -> list[int]:
    """Return for every forward the first one from it on that judged drafts; their number where none did."""
    following = [len(rounds)] * (len(rounds) + 1)
    for number in reversed(range(len(rounds))):
        judges = rounds[number].accepted or rounds[number].scores
        following[number] = number if judges else following[number + 1]
    return following


def _rejected(change: Change) -> Change:
    return Change(
        place=change.place,
        token=change.token,
        probability=change.probability,
        status="rejected",
        num_drafts=change.num_drafts,
    )


def _accepted(trace: Trace, place: int, known: list[_Draft]) -> Change:
    """Make the change of a place that became final: the response knows its token, else its last draft does."""
    last = known[-1].token if known else None
    token = trace.token_ids[place] if place < len(trace.token_ids) else last
    probability = next((draft.probability for draft in reversed(known) if draft.token == token), None)
    return Change(place=place, token=token, probability=probability, status="accepted", num_drafts=len(known))
