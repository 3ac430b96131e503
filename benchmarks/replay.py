"""Models whose answers follow a schedule, at the full cost of body and head.

Random weights accept next to nothing, so the speed of a decoder on them says nothing. Here body and head are computed
as always; then one logit at each place that is read is overwritten, so that drafts are certain, accepted or rejected as
a schedule says. What is overwritten depends on the forward's own tokens and positions alone, so that every decoder
that makes the right forwards, however they are batched or packed, gets the same text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from benchmarks.common import WrappedModel
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Visibility

_SURE, _UNSURE = 1e4, 5.0  # logits: probability 1 in any vocabulary; a low one, but still the highest


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which slots are chosen and how much of them is accepted.

    A round chooses the first ``slots_a_round`` slots that are left. Every second round (the second, the fourth, ...)
    accepts in parts if ``prefixes`` are given: its slots are accepted up to each of these lengths in turn. With (4, 6),
    the joint verification accepts 4 tokens of each slot, the first round of infilling 2 more, the second the rest.

    Attributes:
        slot_size: Tokens a slot.
        slots_a_round: Slots chosen in each round.
        prefixes: Rising lengths within a slot.
    """

    slot_size: int = 8
    slots_a_round: int = 2
    prefixes: tuple[int, ...] = ()

    def num_forwards(self, num_slots: int) -> int:
        """Return the number of forwards that ReFusion's reference mode makes for ``num_slots`` slots."""
        rounds = num_slots // self.slots_a_round
        return 2 * rounds + 2 * len(self.prefixes) * (rounds // 2)


ALL_ACCEPTED = Schedule()
ACCEPTED_IN_PARTS = Schedule(prefixes=(4, 6))
SCHEDULES = {"all accepted": ALL_ACCEPTED, "every second round in parts": ACCEPTED_IN_PARTS}


@dataclass(frozen=True)
class Replay:
    """Says what is read at each token of a forward.

    Attributes:
        schedule: What to follow.
        prompt_length: Tokens of every prompt.
        mask_token_id: The mask token.
    """

    schedule: Schedule
    prompt_length: int
    mask_token_id: int

    def token_at(self, position: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the text's token at a position; exact in bfloat16, and no token with a meaning of its own."""
        return 3 + position % 125

    def script(
        self, ids: Int[Tensor, "batch token"], positions: Int[Tensor, "batch token"]
    ) -> tuple[Int[Tensor, "batch token"], Float[Tensor, "batch token"]]:
        """Return the predicted token of each place, and its logit."""
        size = self.schedule.slot_size
        place = (positions - self.prompt_length).clamp_min(0)
        offset, turn = place % size, place // (size * self.schedule.slots_a_round)
        masked = ids == self.mask_token_id
        rise = torch.ones_like(positions)
        rise[:, 1:] = positions.diff(dim=1)
        after_mask = torch.zeros_like(masked)
        after_mask[:, 1:] = masked[:, :-1]
        # A run is the masks of one slot; a group, all masks that were put there for one plan or one prefix.
        run_offset = _value_at_start(offset, masked & ~(after_mask & (rise == 1) & (offset != 0)))
        first_turn = _value_at_start(turn, masked & ~(after_mask & (rise > 0)))
        is_right = offset < self._accepted_length(turn, run_offset)
        drafted = self.token_at(torch.where(is_right, positions, positions + 60))
        token = torch.where(masked, drafted, self.token_at(positions + 1))
        is_sure = ~masked | (turn == first_turn)
        return token, torch.where(is_sure, _SURE, _UNSURE)

    def _accepted_length(self, turn: Tensor, known: Tensor) -> Tensor:
        """Return how much of a slot is accepted next, when so much of it is known."""
        length = torch.full_like(turn, self.schedule.slot_size)
        for prefix in reversed(self.schedule.prefixes):
            length = torch.where((turn % 2 == 1) & (known < prefix), prefix, length)
        return length

    def overwrite(self, logits: Tensor, ids: Tensor, positions: Tensor) -> None:
        """Put the script into logits of every token of a forward, in place."""
        token, level = self.script(ids, positions)
        logits.scatter_(-1, token[..., None], level[..., None].to(logits.dtype))


def _value_at_start(values: Tensor, starts: Bool[Tensor, "batch token"]) -> Tensor:
    """Copy each start's value to the places after it, up to the next start."""
    index = torch.arange(values.shape[1], device=values.device).expand_as(values)
    return values.gather(1, index.where(starts, 0).cummax(1).values)


class ReplayedModel(WrappedModel):
    """A model that follows a script; hidden states carry it to the head in two more columns."""

    def __init__(self, model: LanguageModel, replay: Replay) -> None:
        super().__init__(model)
        self.replay = replay

    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: Visibility | Bool[Tensor, "batch token key"] | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        hidden = self.run_body(input_ids, position_ids, attention_mask, cache)
        script = torch.stack([values.to(hidden.dtype) for values in self.replay.script(input_ids, position_ids)], -1)
        return torch.cat((hidden, script), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.read(hidden[..., :-2])
        return logits.scatter_(-1, hidden[..., -2:-1].long(), hidden[..., -1:])
