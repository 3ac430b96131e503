"""ReFusion: plan all slots, take the certain ones, verify them together, complete them in parallel.

Source: arXiv 2512.13586. Deliberate differences from the released program: text before an EOS that is found in
a completion is not lost; any number of new tokens works; ids that cannot be part of a response are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import ClassVar, Literal

from refusion_lit.decoding.base import (
    Decoder,
    ModelRequirements,
    Steps,
    require,
    require_choice,
    require_positive,
    require_probability,
)
from refusion_lit.decoding.decoders.refusion_state import Plan, ReFusionState
from refusion_lit.decoding.decoders.slot_infill import OpenSlot, SlotInfill, infill_autoregressively, infill_by_masks
from refusion_lit.decoding.requests import Branch, Draw, Forward, MoreDrafts
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class ReFusion(Decoder):
    """Slot-level parallel decoding with key/value reuse.

    With ``temperature > 0`` only the plan's drafts are sampled; completion rounds stay greedy, as in the
    released program.

    Attributes:
        slot_size: Tokens a slot, K in the paper.
        num_serial_blocks: The response is cut into so many blocks, decoded strictly left to right.
        slot_threshold: Slots of a certainty above it are chosen, in [0, 1].
        token_threshold: Tokens of a probability above it are accepted, in [0, 1].
        certainty: A slot's certainty: probability of its ``first`` draft token, or ``mean``, ``min`` or
            ``product`` over all its draft tokens.
        selection: ``threshold``, ``top_k`` (the k most certain slots) or ``capped`` (at most k above the
            threshold). At least one slot is always chosen.
        k: Number of slots for ``top_k`` and ``capped``.
        infill: How rejected rests are completed: by ``mask`` prediction (the paper), or ``autoregressive``.
        fused: Plan ahead behind the drafts of a verification: if they are accepted, as many as count, the next round
            needs no forward to plan. Exact: changes the number of forwards, never the text.
        completion: Layout of ``mask`` completions, with the same text. ``reference``: a row a slot, two forwards a
            round, as in the paper. ``packed``: one row without copies of the context or of what is cached.
            ``single_forward``: packed, and every verification proposes ahead for all lengths that it may accept.
            ``auto``: as long as that takes at most ``forward_cost`` positions. (``autoregressive`` has its own.)
        forward_cost: What a forward costs besides its positions, in positions: a / b of a cost a + b * positions;
            divide by the batch size. Larger on GPUs.
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(
        attention="causal", predictions=("mask", "next_token_in_slot")
    )

    slot_size: int = 8
    num_serial_blocks: int = 2
    slot_threshold: float = 0.9
    token_threshold: float = 0.9
    certainty: Literal["first", "mean", "min", "product"] = "first"
    selection: Literal["threshold", "top_k", "capped"] = "threshold"
    k: int | None = None
    infill: Literal["mask", "autoregressive"] = "mask"
    fused: bool = True
    completion: Literal["reference", "packed", "single_forward", "auto"] = "auto"
    forward_cost: int = 32

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        require_positive("slot_size", self.slot_size)
        require_positive("num_serial_blocks", self.num_serial_blocks)
        require_probability("slot_threshold", self.slot_threshold)
        require_probability("token_threshold", self.token_threshold)
        require_choice("certainty", self.certainty, ("first", "mean", "min", "product"))
        require_choice("selection", self.selection, ("threshold", "top_k", "capped"))
        require_choice("completion", self.completion, ("reference", "packed", "single_forward", "auto"))
        require(self.forward_cost >= 0, "forward_cost", "an integer of at least 0", self.forward_cost, "use 32, say")
        require_choice("infill", self.infill, ("mask", "autoregressive"))
        needs_k = self.selection != "threshold"
        expected = f"an integer of at least 1 with selection {self.selection!r}" if needs_k else "null"
        holds = self.k is not None and self.k >= 1 if needs_k else self.k is None
        require(holds, "k", expected, self.k, "set k exactly with selection 'top_k' or 'capped'")

    def check(self, sampling: SamplingParams) -> None:
        """Refuse more serial blocks than slots."""
        num_slots = -(-sampling.max_new_tokens // self.slot_size)
        require(
            self.num_serial_blocks <= num_slots,
            "num_serial_blocks",
            f"at most {num_slots} ({sampling.max_new_tokens} new tokens in slots of {self.slot_size})",
            self.num_serial_blocks,
            "use fewer serial blocks, smaller slots or more new tokens",
        )

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> ReFusionState:
        """Make a canvas of ``max_new_tokens`` rounded up to whole slots in equal serial blocks."""
        unit = self.slot_size * self.num_serial_blocks
        length = -(-sampling.max_new_tokens // unit) * unit
        assert special_tokens.mask_token_id is not None
        return ReFusionState(
            prompt=prompt,
            sampling=sampling,
            special_tokens=special_tokens,
            tokens=[special_tokens.mask_token_id] * length,
            is_masked=[True] * length,
            num_slots=length // self.slot_size,
        )

    def step(self, state: ReFusionState) -> Steps:  # type: ignore[override]
        """One round: plan, verify together, and complete in parallel if not even the first slot survived."""
        if not state.remaining:
            state.remaining = self._block_slots(state)
            state.next_block += 1
        plan, state.planned = state.planned, None
        if plan is None:
            plan = yield from self._plan(state)
        chosen, drafts = yield from self._read(state, plan)
        accepted = yield from self._verify(state, chosen, drafts)
        if not self._accept_prefix(state, chosen, drafts, accepted):
            state.planned = None
            yield from self._complete(state, chosen, drafts, accepted)
        last = state.next_block == self.num_serial_blocks
        state.finished = not state.remaining and (last or state.prefix_ends)

    def _block_slots(self, state: ReFusionState) -> list[int]:
        """Return the slots of the serial block after the current one; none if no more text is wanted."""
        size = state.num_slots // self.num_serial_blocks
        start = state.next_block * size
        wanted = start < state.num_slots and start * self.slot_size < state.sampling.max_new_tokens
        return list(range(start, start + size)) if wanted else []

    def _left(self, state: ReFusionState, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return what remains once slots are taken; behind an EOS in the last of them, nothing does."""
        limit = taken[-1] if ends else state.num_slots
        return [slot for slot in state.remaining if slot not in taken and slot < limit]

    def _upcoming(self, state: ReFusionState, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return the slots of the next plan, once slots are taken."""
        left = self._left(state, taken, ends=ends)
        return left if left or ends or state.has_end else self._block_slots(state)

    def _positions(self, state: ReFusionState, slots: Sequence[int]) -> list[int]:
        size, start = self.slot_size, state.prompt_length
        return [start + slot * size + offset for slot in slots for offset in range(size)]

    def _draw(self, state: ReFusionState) -> Draw:
        return Draw(sampling=state.sampling, round=state.num_plans)

    def _masks(
        self,
        state: ReFusionState,
        slots: Sequence[int],
        *,
        num_seen: int,
        write_at: int,
        prompt: Sequence[int] = (),
    ) -> Branch:
        """Return the branch that plans slots behind the cache's first ``num_seen`` entries."""
        mask = state.special_tokens.mask_token_id
        assert mask is not None
        positions = [*range(len(prompt)), *self._positions(state, slots)]
        size, by_first = self.slot_size, self.certainty == "first"
        draft_at = range(len(prompt), len(positions), size if by_first else 1)
        return Branch(
            tokens=[*prompt, *[mask] * (len(positions) - len(prompt))],
            positions=positions,
            visible=((0, num_seen),),
            write_at=write_at,
            draft_at=draft_at,
            prefetch_at=[range(first + 1, first + size) for first in draft_at] if by_first and size > 1 else (),
            num_prefetch=self.k or max(4, 2 * state.num_chosen),
        )

    def _plan(self, state: ReFusionState):  # noqa: ANN202 - a generator like step, returning a plan
        """Feed the masks of all remaining slots, the first time behind the prompt."""
        prompt = state.prompt.token_ids if state.context_length == 0 else ()
        seen = state.context_length
        branch = self._masks(state, state.remaining, num_seen=seen, write_at=seen, prompt=prompt)
        forward = Forward(phase="plan", branches=(branch,), draw=self._draw(state), keep=state.take_keep())
        readings = yield forward
        state.context_length += len(prompt)
        return Plan(state.remaining, len(prompt), 1, readings[-1])

    def _forward_and_plan(self, state: ReFusionState, phase: str, branch: Branch, upcoming: list[int], num_seen: int):  # noqa: ANN202
        """Forward a branch and, behind it, the masks of the next plan, which see its first ``num_seen`` tokens.

        Returns:
            The branch's reading.
        """
        state.planned = None
        keep = state.take_keep()
        if not self.fused or not upcoming:
            readings = yield Forward(phase=phase, branches=(branch,), draw=self._draw(state), keep=keep)
            return readings[0]
        seen, write_at = branch.write_at + num_seen, branch.write_at + len(branch.tokens)
        branches = (branch, self._masks(state, upcoming, num_seen=seen, write_at=write_at))
        phase, draw = f"{phase}+plan", self._draw(state)
        readings = yield Forward(phase=phase, branches=branches, draw=draw, packed=True, keep=keep)
        state.planned = Plan(upcoming, 0, 2, readings[-1])
        return readings[0]

    def _read(self, state: ReFusionState, plan: Plan):  # noqa: ANN202 - a generator, returning slots and drafts
        """Choose slots and draft all their tokens; the head is computed only where the choice reads it."""
        assert plan.slots == state.remaining
        size, reading, draw = self.slot_size, plan.reading, self._draw(state)
        state.num_plans += 1
        if self.certainty != "first":
            groups = [slice(i * size, (i + 1) * size) for i in range(len(plan.slots))]
            chosen = self._choose([self._certainty(reading.probabilities[group]) for group in groups])
            return [plan.slots[i] for i in chosen], [reading.tokens[groups[i]] for i in chosen]
        chosen = self._choose(reading.probabilities)
        state.num_chosen = len(chosen)
        drafts = [[reading.tokens[i]] for i in chosen]
        if size > 1:
            rest = [plan.offset + i * size + offset for i in chosen for offset in range(1, size)]
            draft_at = (*[()] * (plan.num_branches - 1), rest)
            silent = replace(draw, with_probability=False)
            further = (yield MoreDrafts(draft_at=draft_at, draw=silent))[-1].tokens
            for i, draft in enumerate(drafts):
                draft.extend(further[i * (size - 1) : (i + 1) * (size - 1)])
        return [plan.slots[i] for i in chosen], drafts

    def _certainty(self, probabilities: Sequence[float]) -> float:
        if self.certainty == "mean":
            return sum(probabilities) / len(probabilities)
        return min(probabilities) if self.certainty == "min" else prod(probabilities)

    def _choose(self, certainties: Sequence[float]) -> list[int]:
        """Choose slots: the more certain first, ties to the earlier slot; returned in text order."""
        ranked = sorted(range(len(certainties)), key=lambda i: (-certainties[i], i))
        if self.selection == "top_k":
            return sorted(ranked[: self.k])
        certain = [i for i in ranked if certainties[i] > self.slot_threshold]
        return sorted(certain[: self.k] if self.selection == "capped" else certain) or ranked[:1]

    def _verify(self, state: ReFusionState, chosen: list[int], drafts: list[list[int]]):  # noqa: ANN202
        """Forward all drafts in text order; return for every token whether it passes (first tokens always do)."""
        size = self.slot_size
        tokens = [token for draft in drafts for token in draft]
        tested = [offset for offset in range(len(tokens)) if offset % size]
        branch = Branch(
            tokens=tokens,
            positions=self._positions(state, chosen),
            visible=((0, state.context_length),),
            write_at=state.context_length,
            score_at=[(offset - 1, tokens[offset]) for offset in tested],
        )
        eos = state.first_end(tokens)
        num_seen = len(tokens) if eos is None else eos + 1
        upcoming = self._upcoming(state, chosen[: -(-num_seen // size)], ends=eos is not None)
        reading = yield from self._forward_and_plan(state, "verify", branch, upcoming, num_seen)
        passes = [True] * len(tokens)
        for offset, score in zip(tested, reading.scores, strict=True):
            passes[offset] = score > self.token_threshold
        return passes

    def _accept_prefix(
        self, state: ReFusionState, chosen: list[int], drafts: list[list[int]], passes: list[bool]
    ) -> bool:
        """Accept whole slots of the common accepted prefix, or all up to an EOS in it; say whether any was."""
        tokens = [token for draft in drafts for token in draft]
        length = passes.index(False) if False in passes else len(passes)
        eos = state.first_end(tokens[:length])
        num_accepted = length // self.slot_size * self.slot_size if eos is None else eos + 1
        if num_accepted == 0:
            return False
        if eos is None and num_accepted < len(tokens):
            state.planned = None  # its masks have seen drafts that were not accepted
        state.commit([p - state.prompt_length for p in self._positions(state, chosen)[:num_accepted]],
                     tokens[:num_accepted])  # fmt: skip
        state.context_length += num_accepted
        state.remaining = self._left(state, chosen[: -(-num_accepted // self.slot_size)], ends=eos is not None)
        return True

    def _complete(self, state: ReFusionState, chosen: list[int], drafts: list[list[int]], passes: list[bool]) -> Steps:
        size = self.slot_size
        assert state.special_tokens.mask_token_id is not None
        slots, packed = [], self.completion != "reference" and self.infill == "mask"
        for index, (slot, draft) in enumerate(zip(chosen, drafts, strict=True)):
            own = passes[index * size : (index + 1) * size]
            prefix = own.index(False) if False in own else size
            # The first slot has seen nothing but the context, so its entries are final.
            cached = prefix if packed and index == 0 else 0
            slots.append(OpenSlot(state.prompt_length + slot * size, index, draft, prefix, num_cached=cached))
        completion = SlotInfill(
            slots=slots,
            context_length=state.context_length,
            slot_size=size,
            mask_token_id=state.special_tokens.mask_token_id,
            eos_token_ids=state.special_tokens.eos_token_ids,
            sampling=state.sampling,
            packed=packed,
            max_ahead={"single_forward": inf, "auto": self.forward_cost}.get(self.completion, 0),
        )
        complete = infill_by_masks if self.infill == "mask" else infill_autoregressively
        yield from complete(completion, self.token_threshold, state.num_forwards)
        taken = [chosen[slot.index] for slot in completion.slots]
        yield from self._store(state, completion, self._upcoming(state, taken, ends=completion.found_eos))
        for slot in completion.slots:
            first = slot.start - state.prompt_length
            state.commit(range(first, first + slot.num_accepted), slot.tokens[: slot.num_accepted])
        state.remaining = self._left(state, taken, ends=completion.found_eos)

    def _store(self, state: ReFusionState, completion: SlotInfill, upcoming: list[int]) -> Steps:  # noqa: ARG002
        """Keep the completed slots' keys and values as they are, behind the context: ReFusion's reuse."""
        state.keep = completion.kept_indices()
        state.context_length = len(state.keep)
        return
        yield  # a step that needs no forward


@dataclass(frozen=True, kw_only=True)
class RecomputeKV(ReFusion):
    """ReFusion whose parallel completions are followed by a forward that recomputes keys and values.

    The recomputed ones have seen the slots completed beside them. The paper's ablation of key/value reuse.
    """

    def _store(self, state: ReFusionState, completion: SlotInfill, upcoming: list[int]) -> Steps:
        branch = Branch(
            tokens=[token for slot in completion.slots for token in slot.tokens[: slot.num_accepted]],
            positions=[slot.start + i for slot in completion.slots for i in range(slot.num_accepted)],
            visible=((0, state.context_length),),
            write_at=state.context_length,
        )
        yield from self._forward_and_plan(state, "recompute", branch, upcoming, len(branch.tokens))
        state.context_length += len(branch.tokens)
