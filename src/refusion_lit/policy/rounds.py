"""Likelihood of ReFusion's decodes: all tokens that its plans drew, replayed from recorded trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from refusion_lit.engine.decoder import Decoder
from refusion_lit.engine.trajectory import Trajectory
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import required_mask_id
from refusion_lit.noise import KeyedNoise
from refusion_lit.policy.likelihood import LeftToRight, laid_out
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.types import SpecialTokens

_COLUMNS = ("token", "position", "seen", "own_start", "label", "is_mask")


@dataclass(frozen=True, kw_only=True)
class Rounds(LeftToRight):
    """Exact for decodes by ``ReFusion`` with infill by masks, one forward: the trajectory policy.

    What that decoder samples is its plans' drafts, discarded ones included, since they steer which slots are chosen and
    accepted. Verification and infill are deterministic, given the drafts. So the log-probability of a decode is the sum
    over its plans and their drafts. (Different decodes may write the same text: it is that of the decode, not of the
    text.) The forward feeds prompt and answer in decoding order, as the cache held them, then the masks of each plan,
    which see what the cache held at that time: P + L + the sum of all plans' masks positions.

    Texts without a trajectory, as in validation, get the likelihood of :class:`LeftToRight`.
    """

    decoders = (ReFusion,)

    def refusal(self, decoder: Decoder) -> str | None:
        """Refuse other decoders, and infill with bonus tokens, whose plans the record does not tell apart."""
        if isinstance(decoder, ReFusion) and decoder.infill == "bonus":
            return "ReFusion with infill: bonus has no recorded plans; set infill to mask"
        return super().refusal(decoder)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Append the masks of each plan to the decoded text; see :meth:`Likelihood.layout`."""
        if not batch.trajectories:
            return replace(super().layout(batch, noise, special_tokens), places=None)
        mask = required_mask_id(self, special_tokens)
        rows = [np.array(list(_entries(each, self.slot_size, mask))) for each in batch.trajectories]
        width = max(map(len, rows))
        table = np.zeros((len(rows), width, len(_COLUMNS)), dtype=np.int64)
        table[:] = (special_tokens.pad_token_id, width, 0, 0, IGNORE_INDEX, False)
        table[..., _COLUMNS.index("own_start")] = np.arange(width)
        for number, row in enumerate(rows):
            table[number, : len(row)] = row
        device = batch.input_ids.device
        columns = torch.from_numpy(table).to(device)
        ids, positions, seen, own_start, labels, is_mask = columns.unbind(-1)
        index = torch.arange(width, device=device).expand_as(ids)
        before = torch.stack((torch.zeros_like(seen), seen), -1)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        return laid_out(
            labels,
            input_ids=ids,
            position_ids=positions,
            visible=torch.stack((before, torch.stack((own_start, index + 1), -1)), 2),
            is_masked=is_mask.bool(),
            is_real=index < lengths[:, None],
        )


def _entries(trajectory: Trajectory, slot_size: int, mask: int) -> Iterator[tuple[int, ...]]:
    """Yield the values of ``_COLUMNS`` for each token of an answer's sequence.

    The token at an index sees the first ``seen`` tokens, and those from ``own_start`` up to itself.
    """
    num_prompt = len(trajectory.prompt_ids)
    for position, token in enumerate(trajectory.prompt_ids.tolist()):
        yield token, position, 0, 0, IGNORE_INDEX, False
    order: Any = trajectory.order
    places: list[int] = np.argsort(order)[np.count_nonzero(order < 0) :].tolist()
    rounds = trajectory.rounds[places]
    group = num_prompt  # where the tokens that became final in one forward begin
    own_start = num_prompt
    for index, (place, number) in enumerate(zip(places, rounds.tolist(), strict=True), num_prompt):
        is_new = index == num_prompt or number != rounds[index - num_prompt - 1]
        group = index if is_new else group
        own_start = index if is_new or place % slot_size == 0 else own_start
        # Slots that are filled in parallel do not see one another; those verified together do.
        is_joint = str(trajectory.phases[number - 1]).startswith("verify")
        start = group if is_joint else own_start
        yield int(trajectory.tokens[place]), num_prompt + place, group, start, IGNORE_INDEX, False
    index = num_prompt + len(places)
    for number in _followed_plans(trajectory):
        drafts: Int[np.ndarray, "draw 3"] = trajectory.draws[trajectory.draws[:, 0] == number]
        labels = dict(drafts[:, 1:].tolist())
        own_start = index
        for first in sorted(place for place in labels if place % slot_size == 0):
            for place in range(first, first + slot_size):
                label = labels.get(place, IGNORE_INDEX)
                yield mask, num_prompt + place, num_prompt + int((rounds <= number).sum()), own_start, label, True
                index += 1


def _followed_plans(trajectory: Trajectory) -> Iterator[int]:
    """Yield the numbers of the plans that were verified.

    A plan that was made beside a verification is dropped unless all of that was accepted; then another one follows.
    """
    for number, (phase, following) in enumerate(zip(trajectory.phases, trajectory.phases[1:], strict=False), 1):
        if phase.endswith("plan") and following.startswith("verify"):
            yield number
