"""Prefetching: reads drafts that are likely to be requested next in the same device-to-host transfer.

On an accelerator every transfer makes the host wait. The reading of a plan tells which slots are certain; the decoder
then requests the other tokens of these slots, which would be a second transfer. To avoid it, the device ranks the slots
itself, selects more of the most certain ones than are expected to be chosen, and drafts their tokens at once. A
requested draft that was not prefetched is read in a transfer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from refusion_lit.engine.requests import Branch, Draw
from refusion_lit.engine.sampling import noise_keys
from refusion_lit.modeling.transfer import to_device


@dataclass(slots=True)
class Prefetch:
    """Drafts that may be requested after one read.

    Attributes:
        start: Index of the branch's first hidden state.
        groups: Groups of offsets of equal length, one for each draft of the read.
        noise_keys: Key of the noise at each offset; zeros for greedy draws.
        num_groups: Number of groups to prefetch.
        tokens: Receives the drafted token of each offset.
    """

    start: int
    groups: Sequence[Sequence[int]]
    noise_keys: Sequence[Sequence[int]]
    num_groups: int
    tokens: dict[int, int]

    @classmethod
    def of(cls, branch: Branch, draw: Draw, prompt_id: str, start: int, *, tokens: dict[int, int]) -> Prefetch:
        """Return the prefetch of a branch that starts at hidden state ``start``."""
        groups = branch.prefetch_at
        keys = [noise_keys(branch, group, draw, prompt_id) or [0] * len(group) for group in groups]
        return cls(start, groups, keys, branch.num_prefetch, tokens)


class PrefetchedGroups:
    """The groups of the most probable drafts, selected on the device.

    Args:
        wanted: For each read, its first index in ``values`` and its prefetch.
        values: Probability (or logit) of each draft.

    Attributes:
        rows: Indices of the selected hidden states.
        keys: Their noise keys.
        chosen: Number of each selected group.
    """

    def __init__(self, wanted: Sequence[tuple[int, Prefetch]], values: Tensor) -> None:
        self._wanted = [prefetch for _, prefetch in wanted]
        width = max(len(p.groups) for p in self._wanted)
        size = max(len(group) for p in self._wanted for group in p.groups)
        self._num_groups = min(width, max(p.num_groups for p in self._wanted))
        # Padding has the index past the end.
        index = np.full((len(wanted), width), len(values))
        tables = np.zeros((2, len(wanted), width, size), dtype=np.int64)
        for row, (first, p) in enumerate(wanted):
            number = len(p.groups)
            index[row, :number] = np.arange(first, first + number)
            for column, (group, keys) in enumerate(zip(p.groups, p.noise_keys, strict=True)):
                tables[0, row, column, : len(group)] = np.asarray(group) + p.start
                tables[1, row, column, : len(group)] = keys
        padded = torch.cat((values, values.new_full((1,), -torch.inf)))
        ranked = padded.index_select(0, to_device(index.reshape(-1), values.device)).view(len(wanted), width)
        # A stable sort, since certain drafts often tie: the host, too, takes the first ones among equal values.
        self.chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : self._num_groups]
        picked = self.chosen[None, :, :, None].expand(2, -1, -1, size)
        self.rows, self.keys = to_device(tables, values.device).gather(2, picked).flatten(1)

    def fill(self, numbers: list[float]) -> None:
        """Store the prefetched tokens, from the chosen groups, tokens and logits; nothing if a logit is not finite."""
        num_chosen = len(self._wanted) * self._num_groups
        num_tokens = (len(numbers) - num_chosen) // 2
        if not np.isfinite(numbers[num_chosen + num_tokens :]).all():
            return
        chosen = np.array(numbers[:num_chosen], dtype=np.int64).reshape(len(self._wanted), -1)
        tokens = np.array(numbers[num_chosen : num_chosen + num_tokens], dtype=np.int64).reshape(*chosen.shape, -1)
        for prefetch, groups, drafts in zip(self._wanted, chosen.tolist(), tokens.tolist(), strict=True):
            for number, drafted in zip(groups, drafts, strict=True):
                if number < len(prefetch.groups):  # the others are padding
                    prefetch.tokens.update(zip(prefetch.groups[number], drafted, strict=False))
