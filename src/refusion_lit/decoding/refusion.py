"""ReFusion: plan all slots, take the certain ones, verify them together, complete them in parallel.

Source: arXiv 2512.13586. Deliberate differences from the released program: text before an EOS that is found in
a completion is not lost; any number of new tokens works; ids that cannot be part of a response are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal

from refusion_lit.decoding.base import (
    Decoder,
    ModelRequirements,
    RowState,
    Steps,
    require,
    require_choice,
    require_positive,
    require_probability,
)
from refusion_lit.decoding.completion import Completion, OpenSlot, complete_autoregressively, complete_by_masks
from refusion_lit.decoding.requests import Branch, Draw, Forward, MoreDrafts, Reading
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens


@dataclass(kw_only=True)
class ReFusionState(RowState):
    """State of ReFusion.

    Attributes:
        num_slots: Slots of the canvas.
        remaining: Masked slots of the current serial block, in text order.
        next_block: Index of the serial block after the current one.
        context_length: Cache entries of prompt and accepted slots; 0 before the first plan.
        keep: Cache indices to compact at the next forward.
        found_eos: An EOS was accepted: generation ends with the current serial block.
        num_plans: Plans made, which keys their noise.
        planned: Chosen slots and their drafts, if the forward before was the next plan too.
    """

    num_slots: int
    remaining: list[int] = field(default_factory=list)
    next_block: int = 0
    context_length: int = 0
    keep: list[int] | None = None
    found_eos: bool = False
    num_plans: int = 0
    planned: tuple[list[int], list[list[int]]] | None = None

    def take_keep(self) -> list[int] | None:
        """Return the pending compaction, once."""
        keep, self.keep = self.keep, None
        return keep


@dataclass(frozen=True, slots=True)
class _Masks:
    """Masks of slots in a forward: tokens, positions, offsets of first tokens, and offsets that a choice reads."""

    slots: list[int]
    tokens: list[int]
    positions: list[int]
    firsts: range
    draft_at: range


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A plan's masks and what was read off them."""

    masks: _Masks
    reading: Reading


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
        fused: Let a verification be the next plan too, by the masks of the other slots (or of the next serial block)
            behind the drafts: if every draft is accepted, those masks have seen what a plan would show them. Same
            text, up to half the forwards; ``false`` makes the released program's very forwards.
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

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        require_positive("slot_size", self.slot_size)
        require_positive("num_serial_blocks", self.num_serial_blocks)
        require_probability("slot_threshold", self.slot_threshold)
        require_probability("token_threshold", self.token_threshold)
        require_choice("certainty", self.certainty, ("first", "mean", "min", "product"))
        require_choice("selection", self.selection, ("threshold", "top_k", "capped"))
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
            self._next_block(state)
        if state.planned is None:
            state.planned = yield from self._plan(state)
        (chosen, drafts), state.planned = state.planned, None
        passes, ahead = yield from self._verify(state, chosen, drafts)
        num_accepted, ends = self._accepted_prefix(state, drafts, passes)
        if num_accepted == 0:
            yield from self._complete(state, chosen, drafts, passes)
        else:
            self._accept(state, chosen, drafts, num_accepted, ends=ends)
        if ahead is not None and num_accepted == len(passes) and not ends:
            if not state.remaining:
                self._next_block(state)
            state.planned = yield from self._choose_and_draft(state, ahead)
        self._end_round(state)

    def _block(self, state: ReFusionState, index: int) -> list[int]:
        size = state.num_slots // self.num_serial_blocks
        return list(range(index * size, (index + 1) * size))

    def _next_block(self, state: ReFusionState) -> None:
        state.remaining = self._block(state, state.next_block)
        state.next_block += 1

    def _end_round(self, state: ReFusionState) -> None:
        last = state.found_eos or state.next_block == self.num_serial_blocks
        state.finished = not state.remaining and (last or state.prefix_ends)

    def _slot_places(self, slot: int) -> range:
        return range(slot * self.slot_size, (slot + 1) * self.slot_size)

    def _masks(self, state: ReFusionState, slots: Sequence[int], behind: int) -> _Masks:
        """Return the masks of slots, to be fed behind so many other tokens, and where a plan reads them."""
        size = self.slot_size
        mask = state.special_tokens.mask_token_id
        assert mask is not None
        firsts = range(behind, behind + len(slots) * size, size)
        return _Masks(
            slots=list(slots),
            tokens=[mask] * (len(slots) * size),
            positions=[state.prompt_length + place for slot in slots for place in self._slot_places(slot)],
            firsts=firsts,
            draft_at=firsts if self.certainty == "first" else range(behind, behind + len(slots) * size),
        )

    def _plan(self, state: ReFusionState):  # noqa: ANN202 - a generator like step, returning slots and drafts
        """Draft all remaining slots and choose; the head is computed only where the choice reads it."""
        prompt = state.prompt.token_ids if state.context_length == 0 else ()
        masks = self._masks(state, state.remaining, behind=len(prompt))
        readings = yield Forward(
            phase="plan",
            branches=(
                Branch(
                    tokens=[*prompt, *masks.tokens],
                    positions=[*range(len(prompt)), *masks.positions],
                    visible=((0, state.context_length),),
                    write_at=state.context_length,
                    draft_at=masks.draft_at,
                ),
            ),
            draw=self._draw(state),
            keep=state.take_keep(),
        )
        state.context_length += len(prompt)
        return (yield from self._choose_and_draft(state, _Ahead(masks, readings[0])))

    def _draw(self, state: ReFusionState) -> Draw:
        """Return how the next plan's drafts are drawn: by the plan's number, whichever forward it is made in."""
        return Draw(sampling=state.sampling, round=state.num_plans)

    def _choose_and_draft(self, state: ReFusionState, ahead: _Ahead):  # noqa: ANN202 - as _plan
        """Choose among planned slots; the drafts that the choice has not read are read off the same forward."""
        size, masks, reading = self.slot_size, ahead.masks, ahead.reading
        draw = self._draw(state)
        state.num_plans += 1
        if self.certainty != "first":
            groups = [slice(i * size, (i + 1) * size) for i in range(len(masks.slots))]
            chosen = self._choose([self._certainty(reading.probabilities[group]) for group in groups])
            return [masks.slots[i] for i in chosen], [reading.tokens[groups[i]] for i in chosen]
        chosen = self._choose(reading.probabilities)
        drafts = [[reading.tokens[i]] for i in chosen]
        if size > 1:
            rest = [masks.firsts[i] + offset for i in chosen for offset in range(1, size)]
            further = (yield MoreDrafts(draft_at=(rest,), draw=draw))[0].tokens
            for i, draft in enumerate(drafts):
                draft.extend(further[i * (size - 1) : (i + 1) * (size - 1)])
        return [masks.slots[i] for i in chosen], drafts

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
        """Forward all drafts in text order, and masks of what a plan would show next behind them.

        Returns whether each token passes (a slot's first always does), and what was read off the masks.
        """
        size = self.slot_size
        tokens = [token for draft in drafts for token in draft]
        tested = [offset for offset in range(len(tokens)) if offset % size]
        masks = self._masks(state, self._next_slots(state, chosen), behind=len(tokens))
        readings = yield Forward(
            phase="verify+plan" if masks.slots else "verify",
            branches=(
                Branch(
                    tokens=tokens + masks.tokens,
                    positions=[
                        *(state.prompt_length + place for slot in chosen for place in self._slot_places(slot)),
                        *masks.positions,
                    ],
                    visible=((0, state.context_length),),
                    write_at=state.context_length,
                    score_at=[(offset - 1, tokens[offset]) for offset in tested],
                    draft_at=masks.draft_at,
                ),
            ),
            draw=self._draw(state),
        )
        passes = [True] * len(tokens)
        for offset, score in zip(tested, readings[0].scores, strict=True):
            passes[offset] = score > self.token_threshold
        return passes, _Ahead(masks, readings[0]) if masks.slots else None

    def _next_slots(self, state: ReFusionState, chosen: Sequence[int]) -> list[int]:
        """Return the slots of the next plan if all the chosen ones are accepted and none ends."""
        if not self.fused:
            return []
        rest = [slot for slot in state.remaining if slot not in chosen]
        if rest or state.found_eos or state.next_block == self.num_serial_blocks:
            return rest
        block = self._block(state, state.next_block)
        return block if block[0] * self.slot_size < state.sampling.max_new_tokens else []

    def _accepted_prefix(self, state: ReFusionState, drafts: list[list[int]], passes: list[bool]) -> tuple[int, bool]:
        """Return the number of tokens of whole slots that all pass, or of all up to an EOS; and whether one ends."""
        tokens = [token for draft in drafts for token in draft]
        length = passes.index(False) if False in passes else len(passes)
        eos = next((i for i in range(length) if tokens[i] in state.special_tokens.eos_token_ids), None)
        return (length // self.slot_size * self.slot_size, False) if eos is None else (eos + 1, True)

    def _accept(
        self, state: ReFusionState, chosen: list[int], drafts: list[list[int]], num_accepted: int, *, ends: bool
    ) -> None:
        """Accept so many tokens, whose keys and values the verification has stored."""
        tokens = [token for draft in drafts for token in draft]
        places = [place for slot in chosen for place in self._slot_places(slot)]
        state.commit(places[:num_accepted], tokens[:num_accepted])
        state.context_length += num_accepted
        self._take(state, chosen[: -(-num_accepted // self.slot_size)], ends=ends)

    def _take(self, state: ReFusionState, slots: Sequence[int], *, ends: bool) -> None:
        """Take slots out of the remaining ones; behind an EOS in the last of them, all later ones too."""
        limit = slots[-1] if ends else state.num_slots
        state.remaining = [slot for slot in state.remaining if slot not in slots and slot < limit]
        state.found_eos |= ends

    def _complete(self, state: ReFusionState, chosen: list[int], drafts: list[list[int]], passes: list[bool]) -> Steps:
        size = self.slot_size
        assert state.special_tokens.mask_token_id is not None
        slots = []
        for index, (slot, draft) in enumerate(zip(chosen, drafts, strict=True)):
            own = passes[index * size : (index + 1) * size]
            prefix = own.index(False) if False in own else size
            slots.append(OpenSlot(state.prompt_length + slot * size, index, draft, prefix))
        completion = Completion(
            slots=slots,
            context_length=state.context_length,
            slot_size=size,
            mask_token_id=state.special_tokens.mask_token_id,
            eos_token_ids=state.special_tokens.eos_token_ids,
            sampling=state.sampling,
        )
        complete = complete_by_masks if self.infill == "mask" else complete_autoregressively
        yield from complete(completion, self.token_threshold, state.num_forwards)
        yield from self._store(state, completion)
        for slot in completion.slots:
            first = slot.start - state.prompt_length
            state.commit(range(first, first + slot.num_accepted), slot.tokens[: slot.num_accepted])
        self._take(state, [chosen[slot.index] for slot in completion.slots], ends=completion.found_eos)

    def _store(self, state: ReFusionState, completion: Completion) -> Steps:
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

    def _store(self, state: ReFusionState, completion: Completion) -> Steps:
        tokens = [token for slot in completion.slots for token in slot.tokens[: slot.num_accepted]]
        positions = [slot.start + i for slot in completion.slots for i in range(slot.num_accepted)]
        branch = Branch(
            tokens=tokens,
            positions=positions,
            visible=((0, state.context_length),),
            write_at=state.context_length,
        )
        yield Forward(phase="recompute", branches=(branch,), draw=Draw(sampling=state.sampling))
        state.context_length += len(tokens)
