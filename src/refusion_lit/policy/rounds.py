"""Likelihood of ReFusion's decodes: all tokens that its plans drew, replayed from recorded trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from refusion_lit.engine.decoder import Decoder
from refusion_lit.engine.trajectory import Trajectory
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.policy.likelihood import Likelihood, laid_out, mask_id
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least


@dataclass(frozen=True, kw_only=True)
class Rounds(Likelihood):
    """Exact for decodes by ``ReFusion`` with infill by masks, one forward: the trajectory policy.

    What that decoder samples is its plans' drafts, discarded ones included, since they steer which slots are chosen and
    accepted. Verification and infill are deterministic, given the drafts. So the log-probability of a decode is the sum
    over its plans and their drafts. (Different decodes may write the same text: it is that of the decode, not of the
    text.) The forward feeds prompt and answer in decoding order, as the cache held them, then the masks of each plan,
    which see what the cache held at that time: P + L + the sum of all plans' masks positions.

    Without a trajectory, as in validation, the slots of a text count as drafted one by one from left to right.

    Attributes:
        slot_size: Tokens per slot; that of the decoder.
        max_rounds: Plans that are fed at most; of more, as many are drawn at random and weighted accordingly, which
            gives an unbiased estimate. ``None``: all.
    """

    is_exact = True
    decoders = (ReFusion,)
    slot_size: int = 8
    max_rounds: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("objective.likelihood.slot_size", self.slot_size, 1)
        require_at_least("objective.likelihood.max_rounds", self.max_rounds, 1, optional=True)

    @property
    def traits(self) -> ModelTraits:
        """The traits of the hybrid objective."""
        return ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))

    def refusal(self, decoder: Decoder) -> str | None:
        """Refuse other decoders, and infill with bonus tokens, whose plans the record does not tell apart."""
        if isinstance(decoder, ReFusion) and decoder.infill == "bonus":
            return "ReFusion with infill: bonus has no recorded plans; set infill to mask"
        return super().refusal(decoder)

    def layout(self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens) -> CorruptedBatch:
        """Append the masks of each plan to the decoded text; see :meth:`Likelihood.layout`."""
        mask = mask_id(self, special_tokens)
        ids = batch.input_ids.tolist()
        prompts = batch.prompt_lengths.tolist()
        lengths = batch.response_lengths.tolist()
        most = max(-(-length // self.slot_size) for length in lengths)
        orders = noise.uniform("rounds", max([most, *(each.num_forwards for each in batch.trajectories)])).tolist()
        rows = []
        for number, (text, start, length) in enumerate(zip(ids, prompts, lengths, strict=True)):
            row = _Row.of_prompt(text[:start])
            if batch.trajectories:
                plans = _replay(row, batch.trajectories[number], self.slot_size)
            else:
                plans = _one_by_one(row, text[start : start + length], self.slot_size)
            row.append_plans(plans, self.max_rounds, orders[number], mask)
            rows.append(row)
        width = max(len(row.ids) for row in rows)

        def padded(name: str, fill: int | float) -> torch.Tensor:
            values = [getattr(row, name) + [fill] * (width - len(row.ids)) for row in rows]
            return torch.tensor(values, device=batch.input_ids.device)

        ranges = [row.ranges + [[(0, 0), (i, i + 1)] for i in range(len(row.ids), width)] for row in rows]
        labels = padded("labels", IGNORE_INDEX)
        return laid_out(
            labels,
            weights=padded("weights", 0.0).float(),
            input_ids=padded("ids", special_tokens.pad_token_id),
            position_ids=padded("positions", width),
            visible=torch.tensor(ranges, device=labels.device),
            is_masked=padded("is_mask", False),
            is_real=padded("is_real", False),
            places=padded("places", -1),
        )


@dataclass
class _Plan:
    """A plan: how much of the sequence its masks see, their places, and the drafts by place."""

    num_seen: int
    places: Sequence[int]
    drafts: dict[int, int]


@dataclass
class _Row:
    """The sequence of one answer, token by token."""

    num_prompt: int
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ranges: list[list[tuple[int, int]]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    is_mask: list[bool] = field(default_factory=list)
    is_real: list[bool] = field(default_factory=list)

    @classmethod
    def of_prompt(cls, ids: Sequence[int]) -> _Row:
        row = cls(len(ids))
        for position, token in enumerate(ids):
            row.append(token, position, 0, 0)
        return row

    def append(
        self, token: int, position: int, context: int, own: int, label: int = IGNORE_INDEX, weight: float = 0.0,
        *, is_mask: bool = False,
    ) -> None:  # fmt: skip
        """Append a token that sees the first ``context`` tokens and those from index ``own`` up to itself."""
        self.ids.append(token)
        self.positions.append(position)
        self.ranges.append([(0, context), (own, len(self.ids))])
        self.labels.append(label)
        self.weights.append(weight)
        self.places.append(position - self.num_prompt if label != IGNORE_INDEX else -1)
        self.is_mask.append(is_mask)
        self.is_real.append(True)

    def append_plans(self, plans: Sequence[_Plan], limit: int | None, order: Sequence[float], mask: int) -> None:
        """Append the masks of plans, at most ``limit`` of them, those of the lowest numbers in ``order``."""
        numbers = sorted(range(len(plans)), key=lambda i: order[i])[:limit]
        weight = len(plans) / max(len(numbers), 1)
        for plan in (plans[i] for i in sorted(numbers)):
            own = len(self.ids)
            for place in plan.places:
                label = plan.drafts.get(place, IGNORE_INDEX)
                used = weight if label != IGNORE_INDEX else 0.0
                self.append(mask, self.num_prompt + place, plan.num_seen, own, label, used, is_mask=True)


def _replay(row: _Row, trajectory: Trajectory, slot_size: int) -> list[_Plan]:
    """Append the decoded tokens in the cache's order, each seeing what it saw; return the plans that were followed."""
    places = np.flatnonzero(trajectory.order >= 0)
    places = places[np.argsort(trajectory.order[places])].tolist()
    rounds = trajectory.rounds.tolist()
    group = row.num_prompt  # where the tokens that became final in one forward begin
    own = group
    for i, place in enumerate(places):
        if i and rounds[place] != rounds[places[i - 1]]:
            group = len(row.ids)
        is_joint = str(trajectory.phases[rounds[place] - 1]).startswith("verify")
        if i == 0 or place % slot_size == 0 or rounds[place] != rounds[places[i - 1]]:
            own = len(row.ids)
        # Slots that are filled in parallel do not see one another; those verified together do.
        row.append(int(trajectory.tokens[place]), row.num_prompt + place, group, group if is_joint else own)
    plans = []
    for number, phase in enumerate(trajectory.phases, 1):
        # A plan that was made beside a verification is dropped unless all of that was accepted; the next one follows.
        following = next(iter(trajectory.phases[number : number + 1]), "")
        if not (phase.endswith("plan") and following.startswith("verify")):
            continue
        drafts = {int(place): int(token) for at, place, token in trajectory.draws if at == number}
        slots = sorted({place // slot_size for place in drafts if place % slot_size == 0})
        masked = [place for slot in slots for place in range(slot * slot_size, (slot + 1) * slot_size)]
        num_seen = row.num_prompt + sum(1 for place in places if rounds[place] <= number)
        plans.append(_Plan(num_seen, masked, drafts))
    return plans


def _one_by_one(row: _Row, response: Sequence[int], slot_size: int) -> list[_Plan]:
    """Append a text and return a plan for each slot, which drafts all of it."""
    for place, token in enumerate(response):
        row.append(token, row.num_prompt + place, 0, 0)
    starts = range(0, len(response), slot_size)
    return [
        _Plan(
            row.num_prompt + start,
            range(start, min(start + slot_size, len(response))),
            dict(enumerate(response[start : start + slot_size], start)),
        )
        for start in starts
    ]
