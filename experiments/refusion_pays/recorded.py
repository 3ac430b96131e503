"""Training on the states that a decoder went through: accepted slots, then masks for the slots that followed.

``write_states`` stores the decodes; ``RecordedStates`` trains on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from refusion_lit.contrib.rl import Trajectory
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, required_mask_id
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid
from refusion_lit.refusion.objective import corrupt_slots, most_slots
from refusion_lit.types import SpecialTokens
from refusion_lit.utils.require import require, require_at_least

_ARRAYS = ("prompt_ids", "tokens", "rounds", "order", "draws")


def write_states(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories to a file, one JSON object per line."""
    rows = [{**vars(item), **{name: getattr(item, name).tolist() for name in _ARRAYS}} for item in trajectories]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@cache
def read_states(path: str) -> dict[str, Trajectory]:
    """Return the trajectories of a file, by id."""
    states = {}
    for row in map(json.loads, Path(path).read_text(encoding="utf-8").splitlines()):
        arrays = {name: np.array(row[name], dtype=np.int32) for name in _ARRAYS}
        arrays["draws"] = arrays["draws"].reshape(-1, 3)  # also if there are none
        states[row["id"]] = Trajectory(**{**row, **arrays})
    return states


@dataclass(frozen=True, kw_only=True)
class RecordedStates(Hybrid):
    """:class:`Hybrid` on recorded states: d3LLM's trajectories (arXiv 2601.07568), for slots.

    Each sample shows a state of its own decode, drawn uniformly: the slots accepted so far, in the order of their
    acceptance, then masks for the rest of the serial block; what lies beyond is not fed. Targets are the slots that the
    decoder accepted within the next ``window`` rounds; the masked term is the mean over their tokens, then over
    samples.

    Attributes:
        record: File of the trajectories of :class:`~refusion_lit.decoding.ReFusion` on these samples, known by
            their ids. Empty: masks as :class:`Hybrid`.
        window: Rounds whose acceptances are targets, at least 1.
    """

    slot_sizes: tuple[int, ...] = (8,)
    record: str = ""
    window: int = 2

    def __post_init__(self) -> None:
        """Refuse options that cannot be trained with."""
        super().__post_init__()
        require(len(self.slot_sizes) == 1, "objective.slot_sizes", "that of the record", self.slot_sizes, "name one")
        require_at_least("objective.window", self.window, 1)

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Show a recorded state of each sample; see :meth:`Objective.corrupt`. Given ratios mask as in Hybrid."""
        if mask_ratio is not None or not self.record:
            return super().corrupt(batch, noise, special_tokens, mask_ratio=mask_ratio)
        [size], num_slots = self.slot_sizes, most_slots(batch, self.slot_sizes)
        rows = zip(batch.ids, batch.response_lengths.tolist(), noise.uniform("state", 1)[:, 0].tolist(), strict=True)
        states = [self._state(self._trajectory(name, length), num_slots, draw) for name, length, draw in rows]
        is_masked, is_target, order, ends = map(torch.tensor, zip(*states, strict=True))
        fed = replace(batch, response_lengths=batch.response_lengths.minimum(ends * size))
        layout = corrupt_slots(
            fed, noise, is_masked, slot_sizes=torch.full_like(batch.prompt_lengths, size),
            mask_token_id=required_mask_id(self, special_tokens), clean_order=order,
        )  # fmt: skip
        slots = (layout.position_ids - batch.prompt_lengths[:, None]).clamp(min=0) // size
        is_later = (layout.terms == 1) & ~is_target.gather(1, slots.clamp(max=num_slots - 1))
        layout = replace(layout, labels=layout.labels.masked_fill(is_later, IGNORE_INDEX))
        num_targets = ((layout.terms == 1) & ~is_later).sum(1).clamp(min=1)
        ones = torch.ones(len(num_targets), dtype=torch.float64)
        return self.targets(layout, mask_probability=ones, response_lengths=num_targets)

    def _trajectory(self, name: str, length: int) -> Trajectory:
        """Return a sample's trajectory, which must be of its response."""
        states = read_states(self.record).get(name)
        got = "none" if states is None else f"one of {states.num_tokens} tokens for {length}"
        fix = "train on the answers that were recorded, with their ids"
        require(states is not None and states.num_tokens == length, "objective.record", f"a decode of {name}", got, fix)
        assert states is not None
        return states

    def _state(
        self, trajectory: Trajectory, num_slots: int, draw: float
    ) -> tuple[list[bool], list[bool], list[int], int]:
        """Return which slots are masked, which are targets, the order of all, and the slot after the serial block."""
        [size] = self.slot_sizes
        firsts = range(0, trajectory.num_tokens, size)
        stops = [min(first + size, trajectory.num_tokens) for first in firsts]
        rounds = [int(trajectory.rounds[first:stop].max()) for first, stop in zip(firsts, stops, strict=True)]
        steps = sorted({0, *rounds})
        state = int(draw * (len(steps) - 1))
        is_masked = [number > steps[state] for number in rounds]
        is_target = [number in steps[state + 1 : state + 1 + self.window] for number in rounds]
        per_block = len(trajectory.tokens) // size // trajectory.decoder["num_serial_blocks"]
        end = (is_masked.index(True) // per_block + 1) * per_block
        beyond = num_slots - len(rounds)
        order = [int(trajectory.order[first]) for first in firsts]
        padding = [len(trajectory.tokens)] * beyond
        return [*is_masked, *[False] * beyond], [*is_target, *[False] * beyond], [*order, *padding], min(end, num_slots)
