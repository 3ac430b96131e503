"""ReFusion: plans all slots, verifies the certain ones together, and fills the rejected ones in parallel.

Source: arXiv 2512.13586, section 3. Deliberate differences from the released program: if infill finds an EOS, the text
before it is kept; any number of new tokens works; ids that cannot be part of a response are never drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import prod
from operator import itemgetter
from typing import Literal

from refusion_lit.engine.decoder import Decoder, ModelRequirements, above_or_best, most_certain
from refusion_lit.engine.drafting import FEW_POSITIONS
from refusion_lit.engine.requests import Branch, Compaction, MoreDrafts, Reading, Steps
from refusion_lit.noise import stable_key
from refusion_lit.refusion import bonus
from refusion_lit.refusion.infill import OpenSlot, SlotInfill, infill_by_masks, opened
from refusion_lit.refusion.slots import ReFusionState, require_serial_blocks
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import is_number, require

_CONFIDENCES = {"first": itemgetter(0), "mean": lambda each: sum(each) / len(each), "min": min, "product": prod}
"""A slot's confidence from its drafts' probabilities."""


@dataclass(frozen=True, kw_only=True)
class ReFusion(Decoder):
    """ReFusion decoding: slot-level parallel decoding with reuse of the KV cache.

    With ``temperature > 0`` only the plan's drafts are sampled; infill stays greedy, as in the released program.

    Attributes:
        slot_size: Tokens per slot, K in the paper.
        num_serial_blocks: Number of blocks into which the response is cut; they are decoded strictly left to right.
            ``None``: 2, or 1 if the response has a single slot. Spans before given tokens are cut into the same number
            of blocks, which are decoded first. Their slots hold no given token; the last slot of a span may be shorter.
        slot_threshold: Slots with a higher confidence are chosen, in [0, 1].
        token_threshold: Tokens with a higher probability are accepted, in [0, 1].
        slot_confidence: A slot's confidence: the probability of its ``first`` draft token, or the ``mean``, ``min`` or
            ``product`` over all its draft tokens.
        selection: ``threshold`` (at least one slot) or ``top_k`` (the k most confident slots). ``sequential`` (the k
            leftmost slots) and ``random`` (any k, by the seed) ignore confidence; they are baselines for the decoding
            order.
        k: Number of slots for all values of ``selection`` but ``threshold``; 1 by default for ``sequential`` and
            ``random``.
        infill: How rejected tails are filled: by ``mask`` predictions (the paper), ``autoregressive``, or ``bonus``:
            chosen slots are verified side by side, and where a draft is not the model's own next token, that takes its
            place (the bonus token of speculative decoding), and the rest is drafted again. So every forward commits a
            token. For values of ``token_threshold`` from 0.5 on, which all give the same text.
        num_drafts: Maximum number of drafts per slot and forward with ``bonus``: a plan then has one mask more
            than this at the beginning of each slot, which later slots' masks see. ``None``: the rest of the slot.
        fused: Append the masks of the next plan to a verification. If all its drafts are accepted, the next round needs
            no forward to plan; otherwise the masks are discarded. Exact: changes the number of forwards, never the
            text.
        infill_layout: Layout of ``mask`` infill; changes positions, never the text. ``reference``: one row per slot, as
            in the released program. ``packed``: one row, without copies of the context or of cached tokens.
    """

    requires = ModelRequirements(attention="causal", predictions=("mask", "next_token_in_slot"))
    shares = "all"
    refuses = None  # given tokens join the context, at their own positions
    stop_at_eos = False  # serial blocks are decoded whole

    ranges = {
        "slot_size": 1,
        "num_serial_blocks": 1,
        "slot_threshold": "[0, 1]",
        "token_threshold": "[0, 1]",
        "num_drafts": 1,
    }
    slot_size: int = 8
    num_serial_blocks: int | None = None
    slot_threshold: float = 0.9
    token_threshold: float = 0.9
    slot_confidence: Literal["first", "mean", "min", "product"] = "first"
    selection: Literal["threshold", "top_k", "sequential", "random"] = "threshold"
    k: int | None = None
    infill: Literal["mask", "autoregressive", "bonus"] = "mask"
    num_drafts: int | None = None
    fused: bool = True
    infill_layout: Literal["packed", "reference"] = "packed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.infill == "bonus" or self.num_drafts is not None:
            bonus.check_options(self.infill, self.token_threshold, self.num_drafts)
        takes_k = self.selection != "threshold"
        expected = f"an integer of at least 1 with selection {self.selection!r}" if takes_k else "null"
        holds = self.selection != "top_k" if self.k is None else takes_k and is_number(self.k, int) and self.k >= 1
        require(holds, "k", expected, self.k, "set k with selection 'top_k', and never with 'threshold'")

    def check(self, sampling: SamplingParams) -> None:
        """Refuse more serial blocks than slots."""
        require_serial_blocks(self.num_serial_blocks or 1, self.slot_size, sampling)

    def fitted(self, sampling: SamplingParams) -> ReFusion:
        """Return the decoder with no more serial blocks than slots."""
        if self.num_serial_blocks is None:
            return self
        num_slots = -(-sampling.max_new_tokens // self.slot_size)
        return replace(self, num_serial_blocks=min(self.num_serial_blocks, num_slots))

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> ReFusionState:
        """Create a canvas of slots, rounded up to equal serial blocks after the last given token."""
        kind = bonus.BonusState if self.infill == "bonus" else ReFusionState
        return kind.cut(prompt, sampling, special_tokens, self.slot_size, self.num_serial_blocks or 2)

    def step(self, state: ReFusionState) -> Steps[None]:  # type: ignore[override]
        """Run one round: plan, verify together, and fill in parallel if not even the first slot is accepted."""
        if isinstance(state, bonus.BonusState) and (
            yield from bonus.advance(state, self._masks, num_drafts=self.num_drafts, fused=self.fused)
        ):
            return
        if not state.remaining:
            state.remaining = state.blocks.pop(0)
        plan = state.planned or (yield from self._plan(state))
        state.planned = None
        chosen, drafts = yield from self._choose(state, plan)
        if isinstance(state, bonus.BonusState):
            bonus.open_slots(state, chosen, drafts)
            return
        yield from self._verify(state, chosen, drafts)
        state.finished = state.is_filled

    def _plan(self, state: ReFusionState) -> Steps[Reading]:
        """Feed the masks of all remaining slots; the first plan also feeds the prompt and given tokens before them."""
        cached = state.num_cached
        branch = self._masks(state, state.remaining, num_seen=cached, write_at=cached)
        [reading] = yield state.forward("plan", [branch], state.draw)
        state.num_cached += branch.draft_at[0]  # what comes before the masks
        return reading

    def _choose(self, state: ReFusionState, plan: Reading) -> Steps[tuple[list[int], list[list[int]]]]:
        """Choose slots in text order and draft their tokens; the head runs only where the choice needs it."""
        bounds = state.bounds(state.remaining, self._num_masks)
        groups = list(pairwise(bounds))
        draw = state.draw
        state.num_plans += 1
        if len(plan.tokens) == bounds[-1]:  # all were read
            confidence = _CONFIDENCES[self.slot_confidence]
            chosen = self._chosen(state, [confidence(plan.probabilities[slice(*group)]) for group in groups])
            drafts = [plan.tokens[slice(*groups[i])] for i in chosen]
        else:
            chosen = self._chosen(state, plan.probabilities)
            rest = [range(groups[i][0] + 1, groups[i][1]) for i in chosen]
            num_known = len(state.branches[-1].tokens) - bounds[-1]
            offsets = [num_known + offset for own in rest for offset in own]
            draft_at = (*[()] * (len(state.branches) - 1), offsets)
            readings = yield MoreDrafts(draft_at=draft_at, draw=replace(draw, with_probability=False))
            following = iter(readings[-1].tokens)
            drafts = [[plan.tokens[i], *islice(following, len(own))] for i, own in zip(chosen, rest, strict=True)]
        return [state.remaining[i] for i in chosen], drafts

    def _chosen(self, state: ReFusionState, confidences: Sequence[float]) -> list[int]:
        """Return which of the remaining slots are chosen, in text order; ties go to the earlier slot."""
        if self.selection == "threshold":
            return above_or_best(confidences, self.slot_threshold)
        ranked = most_certain(confidences)
        if self.selection == "sequential":
            ranked.sort()
        elif self.selection == "random":
            key = ("slot_order", state.sampling.seed, state.prompt.id, state.num_plans)
            ranked.sort(key=lambda i: stable_key(*key, state.remaining[i]))
        return sorted(ranked[: self.k or 1])

    def _verify(self, state: ReFusionState, chosen: list[int], drafts: list[list[int]]) -> Steps[None]:
        """Forward all drafts in text order, and accept the whole slots of the common prefix that passes.

        First tokens always pass. An EOS ends what is accepted. If not even the first slot is, all are filled.
        """
        tokens = [token for own in drafts for token in own]
        bounds = state.bounds(chosen)
        firsts = {*bounds}
        tested = [offset for offset in range(len(tokens)) if offset not in firsts]
        branch = Branch(
            tokens=tokens,
            positions=state.positions(chosen),
            visible=((0, state.num_cached),),
            write_at=state.num_cached,
            score_at=[(offset - 1, tokens[offset]) for offset in tested],
        )
        eos = state.first_eos(tokens)
        num_seen = len(tokens) if eos is None else eos + 1
        reached = chosen[: bisect_left(bounds, num_seen)]
        upcoming = state.upcoming(reached, ends=eos is not None)
        reading = yield from self._forward_and_plan(state, "verify", branch, upcoming, num_seen)
        scores = dict(zip(tested, reading.scores, strict=True))
        passes = [offset not in scores or scores[offset] > self.token_threshold for offset in range(len(tokens))]
        length = [*passes, False].index(False)
        eos = state.first_eos(tokens[:length])
        num_accepted = max(bound for bound in bounds if bound <= length) if eos is None else eos + 1
        if eos is None and num_accepted < len(tokens):
            state.planned = None  # its masks have seen drafts that were not accepted
        if num_accepted == 0:
            yield from self._fill(state, chosen, drafts, passes)
            return
        places = [place for slot in chosen for place in state.slots[slot]]
        state.commit(places[:num_accepted], tokens[:num_accepted])
        state.num_cached += num_accepted
        state.remaining = state.left(chosen[: bisect_left(bounds, num_accepted)], ends=eos is not None)

    def _fill(
        self, state: ReFusionState, chosen: list[int], drafts: list[list[int]], passes: list[bool]
    ) -> Steps[None]:
        """Fill all chosen slots in parallel, and commit them."""
        packed = self.infill_layout == "packed" and self.infill == "mask"
        prefixes = [[*passes[slice(*part)], False].index(False) for part in pairwise(state.bounds(chosen))]
        infill = opened(state, chosen, drafts, prefixes, OpenSlot, packed=packed)
        if packed:  # the first slot has seen nothing but the context, so its entries are final
            infill.slots[0].num_cached = infill.slots[0].num_accepted
        fill = infill_by_masks if self.infill == "mask" else bonus.infill_autoregressively
        yield from fill(infill, self.token_threshold)
        yield from self._store(state, infill)
        infill.commit()
        state.remaining = state.left(infill.taken, ends=infill.found_eos)

    def _store(self, state: ReFusionState, infill: SlotInfill[OpenSlot]) -> Steps[None]:
        """Keep the filled slots' KV cache entries as they are, after the context: ReFusion's reuse."""
        state.keep = Compaction(state.num_cached, infill.kept_indices())
        state.num_cached += len(state.keep.indices)
        yield from ()

    def _forward_and_plan(
        self, state: ReFusionState, phase: str, branch: Branch, upcoming: list[int], num_seen: int
    ) -> Steps[Reading]:
        """Forward a branch followed by the masks of the next plan, which see its first ``num_seen`` tokens."""
        branches = [branch]
        if plans := self.fused and bool(upcoming):
            seen = branch.write_at + num_seen
            write_at = branch.write_at + len(branch.tokens)
            branches.append(self._masks(state, upcoming, num_seen=seen, write_at=write_at))
        readings = yield state.forward(phase + "+plan" * plans, branches, state.draw)
        state.planned = readings[-1] if plans else None
        return readings[0]

    def _masks(self, state: ReFusionState, slots: Sequence[int], *, num_seen: int, write_at: int) -> Branch:
        """Return the branch that plans slots after ``num_seen`` cache entries, in the first plan also known tokens."""
        known = () if state.num_plans else state.known[state.num_cached :]
        masks = state.positions(slots, self._num_masks)
        # With few masks, reading all of them at once costs less than a second pass of the head.
        is_lazy = self.slot_confidence == "first" and (self.infill != "bonus" or len(masks) > FEW_POSITIONS)
        groups = [len(known) + bound for bound in state.bounds(slots, self._num_masks)]
        return Branch(
            tokens=[*(token for token, _ in known), *[state.mask_token_id] * len(masks)],
            positions=[*(position for _, position in known), *masks],
            visible=((0, num_seen),),
            write_at=write_at,
            draft_at=groups[:-1] if is_lazy else range(groups[0], groups[-1]),
        )

    @property
    def _num_masks(self) -> int | None:
        """Masks of a plan per slot; ``None``: as many as the slot has tokens."""
        return None if self.num_drafts is None else 1 + self.num_drafts
