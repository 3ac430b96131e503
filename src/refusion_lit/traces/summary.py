"""Statistics over traces: acceptance lengths, decoding order, drafts, and forwards by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from refusion_lit.traces.document import Trace
from refusion_lit.traces.timeline import timeline


@dataclass(frozen=True, kw_only=True)
class TraceStatistics:
    """Counts over any number of traces; adding two statistics gives those of all their traces.

    Attributes:
        num_traces: Number of decodes.
        num_tokens: Response tokens.
        num_forwards: Forwards of all decodes.
        acceptance_lengths: Number of accepted tokens of each forward that accepted any.
        slots_per_round: Number of slots that contain them, for the same forwards.
        num_slots: Slots with at least one accepted token.
        num_slots_out_of_order: Slots whose last token was accepted by a forward after which an earlier position was
            still open; 0 for left-to-right decoding.
        num_drafts: Drafted tokens, counted every time.
        num_replanned: Drafts that were rejected and whose position was drafted again.
        forwards_by_phase: Number of forwards of each phase, in order of first use.
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
        """Response tokens per forward."""
        return _ratio(self.num_tokens, self.num_forwards)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of accepted tokens over the forwards that accepted any."""
        return _ratio(sum(self.acceptance_lengths), len(self.acceptance_lengths))

    @property
    def mean_slots_per_round(self) -> float:
        """Mean number of slots with accepted tokens over the forwards that accepted any."""
        return _ratio(sum(self.slots_per_round), len(self.slots_per_round))

    @property
    def share_out_of_order(self) -> float:
        """Share of the slots that were not decoded left to right, in [0, 1]."""
        return _ratio(self.num_slots_out_of_order, self.num_slots)

    def __add__(self, other: TraceStatistics) -> TraceStatistics:
        """Return the statistics of the traces of both."""
        names = [f.name for f in fields(self) if f.name != "forwards_by_phase"]
        phases = Counter(self.forwards_by_phase) + Counter(other.forwards_by_phase)
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return TraceStatistics(**sums, forwards_by_phase=dict(phases))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and ratios as JSON values."""
        ratios = ("tokens_per_forward", "mean_acceptance_length", "mean_slots_per_round", "share_out_of_order")
        counts = [name for name in vars(self) if name.startswith("num_")]
        named = {name: getattr(self, name) for name in (*counts, *ratios)}
        return {**named, "forwards_by_phase": dict(self.forwards_by_phase)}


def trace_statistics(traces: Iterable[Trace]) -> TraceStatistics:
    """Return the statistics of traces, of one decoder or of several."""
    return sum(map(_of_one, traces), TraceStatistics())


def _of_one(trace: Trace) -> TraceStatistics:
    size = trace.slot_size
    history = timeline(trace)
    accepted = [[change.index for change in changes if change.status == "accepted"] for changes in history.changes]
    accepted = [indices for indices in accepted if indices]
    num_drafts = [change.num_drafts for change in history.final() if change is not None and change.num_drafts]
    num_slots, num_out_of_order = _count_slots(history.final_forwards(), size)
    return TraceStatistics(
        num_traces=1,
        num_tokens=len(trace.token_ids),
        num_forwards=trace.num_forwards,
        acceptance_lengths=tuple(map(len, accepted)),
        slots_per_round=tuple(len({index // size for index in indices}) for indices in accepted),
        num_slots=num_slots,
        num_slots_out_of_order=num_out_of_order,
        num_drafts=sum(num_drafts),
        num_replanned=sum(num - 1 for num in num_drafts),  # the last draft of a position is not drafted again
        forwards_by_phase=dict(Counter(entry.phase for entry in trace.rounds)),
    )


def _count_slots(final_forwards: list[int], size: int) -> tuple[int, int]:
    """Count the slots with accepted tokens, and those accepted before an earlier position."""
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


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
