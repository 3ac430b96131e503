"""Reading ahead: tokens that will probably be asked for next are drawn before the host knows that it wants them.

On an accelerator every answer makes the host wait for the device. A plan's reading says which slots are certain; only
then are the other tokens of these slots wanted, which would be a second wait. So the device itself takes the most
certain ones, more than are expected to be chosen, and draws their tokens in the same go. What the host then chooses is
up to it: a token that is not there is read as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from refusion_lit.decoding.span import Later, Span
from refusion_lit.modeling.transfer import to_device

Drawer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Draws tokens at places, given their noise keys; returns them and a value each that is finite if all is well."""


class ReadAhead:
    """Tokens of one group of spans that are read ahead.

    Args:
        group: Spans that are drawn alike, in the order in which their values stand; drafts stand before given tokens.
        device: Where the hidden states are.
    """

    def __init__(self, group: Sequence[Span], device: torch.device) -> None:
        starts = accumulate((len(span.index) for span in group), initial=0)
        drafted: list[tuple[range, Later]] = []
        self._sure: list[Later] = []
        for span, start in zip(group, starts, strict=False):
            if span.later is not None and span.index:
                drafted.append((range(start, start + len(span.index)), span.later))
            elif span.later is not None:
                self._sure.append(span.later)
        self._drafted = [later for _, later in drafted]
        self._num_chosen = 0
        if drafted:
            width = max(len(own) for own, _ in drafted)
            self._num_chosen = min(width, max(later.num_prefetch for later in self._drafted))
            # Padding stands behind the last value.
            values = np.full((len(drafted), width), sum(len(span.index) for span in group))
            for row, (own, _) in enumerate(drafted):
                values[row, : len(own)] = own
            self._values = to_device(values, device)
            self._groups, self._group_keys = (to_device(table, device) for table in _tables(self._drafted, width))
        flat = [
            (later.start + offset, later.noise_keys.get(offset, 0)) for later in self._sure for offset in _flat(later)
        ]
        self._flat, self._flat_keys = (to_device([pair[i] for pair in flat], device) for i in (0, 1))

    def found(self, values: Tensor, draw: Drawer) -> Tensor:
        """Return the chosen groups' numbers, then the tokens, then their values.

        Args:
            values: Probability of each draft of the group of spans, or its logit.
            draw: How tokens are drawn.
        """
        places, keys, chosen = self._flat, self._flat_keys, self._flat[:0]
        if self._num_chosen:
            padded = torch.cat((values, values.new_full((1,), -torch.inf)))
            ranked = padded.index_select(0, self._values.flatten()).view_as(self._values)
            # Among equal ones, and certain ones often are, the host too takes the first.
            top = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : self._num_chosen]
            index = top[..., None].expand(-1, -1, self._groups.shape[-1])
            places = torch.cat((self._groups.gather(1, index).flatten(), places))
            keys = torch.cat((self._group_keys.gather(1, index).flatten(), keys))
            chosen = top.flatten()
        tokens, own = draw(places, keys)
        return torch.cat((chosen.to(own.dtype), tokens.to(own.dtype), own))

    def fill(self, numbers: list[float]) -> None:
        """Hand out what :meth:`found` found; nothing if logits were spoilt."""
        num_chosen = len(self._drafted) * self._num_chosen
        num_tokens = (len(numbers) - num_chosen) // 2
        if not np.isfinite(numbers[num_chosen + num_tokens :]).all():
            return
        tokens = map(int, numbers[num_chosen : num_chosen + num_tokens])
        length = self._groups.shape[-1] if num_chosen else 0
        for row, later in enumerate(self._drafted):
            for number in numbers[row * self._num_chosen : (row + 1) * self._num_chosen]:
                drawn = [next(tokens) for _ in range(length)]
                if number < len(later.groups):  # else it is padding
                    later.tokens.update(zip(later.groups[int(number)], drawn, strict=False))
        for later in self._sure:
            later.tokens.update((offset, next(tokens)) for offset in _flat(later))


def _flat(later: Later) -> list[int]:
    return [offset for group in later.groups for offset in group]


def _tables(laters: Sequence[Later], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of every group [branch, group, token] and their noise keys; zeros where there is none."""
    length = max(len(group) for later in laters for group in later.groups)
    places = np.zeros((len(laters), width, length), dtype=np.int64)
    keys = np.zeros_like(places)
    for row, later in enumerate(laters):
        for number, group in enumerate(later.groups):
            places[row, number, : len(group)] = [later.start + offset for offset in group]
            keys[row, number, : len(group)] = [later.noise_keys.get(offset, 0) for offset in group]
    return places, keys
