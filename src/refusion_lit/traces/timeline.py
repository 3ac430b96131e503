"""The status of every response token after every forward, and a trace's statistics.

A trace records the tokens that a forward drafted and the positions that it accepted. A draft's status follows from
these records alone, for any decoder:

- **accepted**: the next event at the draft's position is its acceptance;
- **rejected**: the position is drafted again. The rejection counts from the forward that judged the draft: the first
  forward, beginning with the draft's forward, that accepted tokens or computed scores. The draft's forward itself
  counts only if it computed no scores, because scores verify earlier drafts;
- **drafted**: nothing else happens at the position, which is after the end of the response.

A draft at a position with an earlier draft is **re-planned**.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from refusion_lit.engine.output import TraceRound
from refusion_lit.traces.document import Trace

Status = Literal["drafted", "rejected", "accepted"]


@dataclass(frozen=True, slots=True)
class Change:
    """A response token's new state.

    Attributes:
        index: Index in the response (position minus prompt length).
        token: Token id; ``None`` if the trace does not record an accepted token's id.
        probability: The token's probability when drafted; ``None`` if the token was not drafted.
        status: Status from this forward on.
        num_drafts: Drafts at the position so far; above 1 the token was re-planned.
    """

    index: int
    token: int | None
    probability: float | None
    status: Status
    num_drafts: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All changes of a decode.

    Attributes:
        changes: Changes by forward, in text order, at most one per token.
        canvas_length: Number of positions after the prompt.
    """

    changes: tuple[tuple[Change, ...], ...]
    canvas_length: int

    def after(self, num_forwards: int) -> list[Change | None]:
        """Return the state of every token after a number of forwards; ``None`` for masked tokens."""
        states: list[Change | None] = [None] * self.canvas_length
        for changes in self.changes[:num_forwards]:
            for change in changes:
                states[change.index] = change
        return states

    def final_forwards(self) -> list[int]:
        """Return, for all tokens, the number from 1 of the forward that accepted the token; 0 if none did."""
        forwards = [0] * self.canvas_length
        for number, changes in enumerate(self.changes, start=1):
            for change in changes:
                if change.status == "accepted":
                    forwards[change.index] = number
        return forwards


def timeline(trace: Trace) -> Timeline:
    """Compute the status of every response token after every forward, by the rules at the top of this file."""
    next_judge = _judging_forwards(trace.rounds)
    by_forward: list[dict[int, Change]] = [{} for _ in trace.rounds]
    drafts: dict[int, list[Change]] = {}  # all drafts so far, by index in the response
    drafted_by: dict[int, int] = {}  # the forward of the last draft, by index
    accepted: set[int] = set()
    for forward, entry in enumerate(trace.rounds):
        for position, token, probability in zip(entry.positions, entry.tokens, entry.probabilities, strict=True):
            index = position - trace.prompt_length
            if index in accepted:
                continue  # a forward may recompute accepted positions
            earlier = drafts.setdefault(index, [])
            last_forward = drafted_by.get(index)
            if last_forward == forward:  # a forward that drafts a position twice replaces its first draft
                earlier.pop()
            elif last_forward is not None:
                # A forward with scores verifies the drafts of earlier forwards, not the drafts that it makes.
                has_scores = bool(trace.rounds[last_forward].scores)
                judge = next_judge[last_forward + 1 if has_scores else last_forward]
                if judge < forward:
                    by_forward[judge][index] = replace(earlier[-1], status="rejected")
            draft = Change(index, token, probability, "drafted", num_drafts=len(earlier) + 1)
            earlier.append(draft)
            by_forward[forward][index] = draft
            drafted_by[index] = forward
        new_indices = {position - trace.prompt_length for position in entry.accepted} - accepted
        accepted |= new_indices
        for index in new_indices:
            by_forward[forward][index] = _make_acceptance(trace, index, drafts.get(index, ()))
    changes = tuple(tuple(change for _, change in sorted(by_index.items())) for by_index in by_forward)
    return Timeline(changes=changes, canvas_length=trace.canvas_length)


def _judging_forwards(rounds: Sequence[TraceRound]) -> list[int]:
    """For every forward, return the first forward, itself included, that judges drafts; ``len(rounds)`` if none does.

    A forward judges drafts if it accepted tokens or computed scores.
    """
    judges = [len(rounds)] * (len(rounds) + 1)
    for forward in reversed(range(len(rounds))):
        is_judge = rounds[forward].accepted or rounds[forward].scores
        judges[forward] = forward if is_judge else judges[forward + 1]
    return judges


def _make_acceptance(trace: Trace, index: int, drafts: Sequence[Change]) -> Change:
    """Return the change that accepts a token. After the response's end, the accepted token is the last draft."""
    last_draft = drafts[-1].token if drafts else None
    token = trace.token_ids[index] if index < len(trace.token_ids) else last_draft
    probability = next((draft.probability for draft in reversed(drafts) if draft.token == token), None)
    return Change(index, token, probability, "accepted", num_drafts=len(drafts))


def trace_statistics(trace: Trace) -> dict[str, str]:
    """Return a trace's figures by name, formatted for display.

    Means are over forwards that accepted a token. A slot (for decoders without slots, a token) is out of order if an
    earlier position was still open after the forward that accepted its last token. Left-to-right decoding has no slots
    out of order. Repeated drafts of a position all count.
    """
    history = timeline(trace)
    length = len(trace.token_ids)  # what lies after an EOS token does not count
    accepted = [
        [change.index for change in changes if change.status == "accepted" and change.index < length]
        for changes in history.changes
    ]
    accepted = [indices for indices in accepted if indices]
    slots = [{index // trace.slot_size for index in indices} for indices in accepted]
    last = history.after(trace.num_forwards)
    num_drafts = [change.num_drafts for change in last if change is not None and change.num_drafts]
    num_slots, num_out_of_order = _count_slots(history.final_forwards()[:length], trace.slot_size)
    share = 100 * num_out_of_order / max(num_slots, 1)
    has_slots = trace.slot_size > 1
    return {
        "tokens": str(length),
        "forwards": str(trace.num_forwards),
        "tokens per forward": f"{length / max(trace.num_forwards, 1):.2f}",
        "tokens accepted at a time": f"{sum(map(len, accepted)) / max(len(accepted), 1):.2f}",
        **({"slots filled at a time": f"{sum(map(len, slots)) / max(len(slots), 1):.2f}"} if has_slots else {}),
        f"{'slots' if has_slots else 'tokens'} out of order": f"{num_out_of_order} of {num_slots} ({share:.0f} %)",
        "drafts": str(sum(num_drafts)),
        # Every draft of a position but the last was drafted again.
        "drafts rejected and drafted again": str(sum(num_drafts) - len(num_drafts)),
    }


def _count_slots(final_forwards: list[int], size: int) -> tuple[int, int]:
    """Count the slots with accepted tokens, and the slots accepted before an earlier position."""
    never = max(final_forwards, default=0) + 1  # stands for a position that was never accepted
    num_slots = num_out_of_order = 0
    latest_before = 0
    for start in range(0, len(final_forwards), size):
        slot = final_forwards[start : start + size]
        accepted = [number for number in slot if number]
        if accepted:
            num_slots += 1
            num_out_of_order += max(accepted) < latest_before
        latest_before = max(latest_before, *(number or never for number in slot))
    return num_slots, num_out_of_order
