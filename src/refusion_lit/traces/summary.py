"""Counts over traces: how much a round accepts, in which order, and what the forwards were for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from refusion_lit.traces.document import Trace
from refusion_lit.traces.timeline import timeline


@dataclass(frozen=True, kw_only=True)
class TraceStatistics:
    """What traces have in common; counts add up over any number of them.

    Attributes:
        num_traces: Decodes.
        num_tokens: Tokens of the responses.
        num_forwards: Forwards of all decodes.
        acceptance_lengths: Tokens that became final, for each forward that made any final.
        slots_per_round: Slots that they lie in, for the same forwards.
        num_slots: Slots that became final, wholly or up to the end of a response.
        num_slots_out_of_order: Those of them that did so while an earlier place of the text was still open after
            the same forward: the order was not left to right.
        num_drafts: Tokens drafted, each time counted.
        num_replanned: Drafts that were rejected, their place being drafted again.
        forwards_by_phase: Forwards by what they were for, in order of first use.
    """

    num_traces: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    acceptance_lengths: tuple[int, ...] = ()
    slots_per_round: tuple[int, ...] = ()
    num_slots: int = 0
    num_slots_out_of_order: int = 0
    num_drafts: int = 0
    num_replanned: int = 0
    forwards_by_phase: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_forward(self) -> float:
        """Response tokens a forward."""
        return _ratio(self.num_tokens, self.num_forwards)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a forward that made any final."""
        return _ratio(sum(self.acceptance_lengths), len(self.acceptance_lengths))

    @property
    def mean_slots_per_round(self) -> float:
        """Slots a forward that made any token final."""
        return _ratio(sum(self.slots_per_round), len(self.slots_per_round))

    @property
    def share_out_of_order(self) -> float:
        """Share of the slots that were not decoded left to right, in [0, 1]."""
        return _ratio(self.num_slots_out_of_order, self.num_slots)

    def __add__(self, other: TraceStatistics) -> TraceStatistics:
        """Return the statistics of both."""
        return TraceStatistics(
            num_traces=self.num_traces + other.num_traces,
            num_tokens=self.num_tokens + other.num_tokens,
            num_forwards=self.num_forwards + other.num_forwards,
            acceptance_lengths=self.acceptance_lengths + other.acceptance_lengths,
            slots_per_round=self.slots_per_round + other.slots_per_round,
            num_slots=self.num_slots + other.num_slots,
            num_slots_out_of_order=self.num_slots_out_of_order + other.num_slots_out_of_order,
            num_drafts=self.num_drafts + other.num_drafts,
            num_replanned=self.num_replanned + other.num_replanned,
            forwards_by_phase=dict(Counter(self.forwards_by_phase) + Counter(other.forwards_by_phase)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        return {
            "num_traces": self.num_traces,
            "num_tokens": self.num_tokens,
            "num_forwards": self.num_forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "mean_acceptance_length": self.mean_acceptance_length,
            "mean_slots_per_round": self.mean_slots_per_round,
            "num_slots": self.num_slots,
            "num_slots_out_of_order": self.num_slots_out_of_order,
            "share_out_of_order": self.share_out_of_order,
            "num_drafts": self.num_drafts,
            "num_replanned": self.num_replanned,
            "forwards_by_phase": dict(self.forwards_by_phase),
        }


def trace_statistics(traces: Iterable[Trace]) -> TraceStatistics:
    """Count over traces, of one decoder or of several."""
    return sum(map(_one, traces), TraceStatistics())


def _one(trace: Trace) -> TraceStatistics:
    size = trace.slot_size
    line = timeline(trace)
    final_at = line.final_forwards()
    lengths, slots = [], []
    for changes in line.changes:
        places = [change.place for change in changes if change.status == "accepted"]
        if places:
            lengths.append(len(places))
            slots.append(len({place // size for place in places}))
    num_drafts = num_replanned = 0
    for change in line.final():
        if change is not None and change.num_drafts:
            num_drafts += change.num_drafts
            num_replanned += change.num_drafts - 1  # all but the last were drafted again
    num_slots, out_of_order = _order(final_at, size)
    return TraceStatistics(
        num_traces=1,
        num_tokens=len(trace.token_ids),
        num_forwards=trace.num_forwards,
        acceptance_lengths=tuple(lengths),
        slots_per_round=tuple(slots),
        num_slots=num_slots,
        num_slots_out_of_order=out_of_order,
        num_drafts=num_drafts,
        num_replanned=num_replanned,
        forwards_by_phase=dict(Counter(entry.phase for entry in trace.rounds)),
    )


def _order(final_at: list[int], size: int) -> tuple[int, int]:
    """Count slots that became final, and those that did before an earlier place."""
    never = max(final_at, default=0) + 1  # a place that stayed open
    num_slots = out_of_order = 0
    latest_before = 0
    for start in range(0, len(final_at), size):
        places = final_at[start : start + size]
        known = [number for number in places if number]
        if known:
            num_slots += 1
            out_of_order += max(known) < latest_before
        latest_before = max(latest_before, *(number or never for number in places))
    return num_slots, out_of_order


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
