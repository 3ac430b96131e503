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

from refusion_lit.decoding.span import Span
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
        drafted = [(span, start) for span, start in zip(group, starts, strict=False) if span.later and span.index]
        self._drafted = [span for span, _ in drafted]
        self._sure = [span for span in group if span.later and not span.index]
        num_values = sum(len(span.index) for span in group)
        self._num_chosen = 0
        if drafted:
            width = max(len(span.index) for span in self._drafted)
            self._num_chosen = min(width, max(span.num_likely for span in self._drafted))
            values = np.full((len(drafted), width), num_values)  # padding stands behind the last value
            for row, (span, start) in enumerate(drafted):
                values[row, : len(span.index)] = range(start, start + len(span.index))
            self._values = to_device(values, device)
            self._groups, self._group_keys = (to_device(a, device) for a in _tables(self._drafted, width))
        flat = [(span.start + offset, key) for span in self._sure for offset, key in _flat(span)]
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
        """Give the spans what :meth:`found` found; nothing if logits were spoilt."""
        num_chosen = len(self._drafted) * self._num_chosen
        num_tokens = (len(numbers) - num_chosen) // 2
        if not np.isfinite(numbers[num_chosen + num_tokens :]).all():
            return
        tokens = map(int, numbers[num_chosen : num_chosen + num_tokens])
        length = self._groups.shape[-1] if num_chosen else 0
        for row, span in enumerate(self._drafted):
            for number in numbers[row * self._num_chosen : (row + 1) * self._num_chosen]:
                drawn = [next(tokens) for _ in range(length)]
                if number < len(span.later):  # else it is padding
                    span.ahead.update(zip(span.later[int(number)], drawn, strict=False))
        for span in self._sure:
            span.ahead.update((offset, next(tokens)) for offset, _ in _flat(span))


def _flat(span: Span) -> list[tuple[int, int]]:
    """Return all offsets of a span's groups with their noise keys."""
    offsets = [offset for group in span.later for offset in group]
    return [(offset, span.later_keys.get(offset, 0)) for offset in offsets]


def _tables(spans: Sequence[Span], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of every group [span, group, token] and their noise keys; zeros where there is none."""
    length = max(len(group) for span in spans for group in span.later)
    places = np.zeros((len(spans), width, length), dtype=np.int64)
    keys = np.zeros_like(places)
    for row, span in enumerate(spans):
        for number, group in enumerate(span.later):
            places[row, number, : len(group)] = [span.start + offset for offset in group]
            keys[row, number, : len(group)] = [span.later_keys.get(offset, 0) for offset in group]
    return places, keys
