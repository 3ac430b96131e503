"""ReFusion: drafts all slots, verifies confident slots together, and fills rejected slots in parallel.

Source: arXiv 2512.13586, section 3. Deliberate differences from the released program: if infill finds an EOS, the text
before it is kept; any number of new tokens works; ids that cannot be part of a response are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from math import prod
from operator import itemgetter
from typing import Literal

from refusion_lit.engine.branches import FEW_POSITIONS
from refusion_lit.engine.decoder import Decoder, ModelRequirements, above_or_best, most_certain
from refusion_lit.engine.requests import Branch, MoreDrafts, Steps
from refusion_lit.noise import stable_key
from refusion_lit.refusion import bonus
from refusion_lit.refusion.infill import infill_autoregressively, infill_by_masks
from refusion_lit.refusion.slots import OpenSlot, SlotState, require_serial_blocks
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import is_number, require

_CONFIDENCES = {"first": itemgetter(0), "mean": lambda values: sum(values) / len(values), "min": min, "product": prod}
"""A slot's confidence from its drafts' probabilities."""


@dataclass(frozen=True, kw_only=True)
class ReFusion(Decoder):
    """ReFusion decoding: slot-level parallel decoding that reuses the KV cache.

    With ``temperature > 0`` only the plan's drafts are sampled; infill stays greedy, as in the released program.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> [row] = model.generate(["12+34,56+78>"], decoder=ReFusion(slot_size=4), max_new_tokens=24)
    >>> row.text, row.num_tokens, row.num_forwards
    ('12+34=46;56+78=134;', 20, 3)

    Attributes:
        slot_size: Tokens per slot, K in the paper.
        num_serial_blocks: Number of blocks into which the response is cut. Blocks are decoded strictly left to right.
            ``None``: 2, or 1 if the response has a single slot. Spans before given tokens are cut into as many blocks,
            which are decoded first. Slots contain no given token, so a span's last slot may be shorter.
        slot_threshold: Slots with a higher confidence are chosen, in [0, 1].
        token_threshold: Tokens with a higher probability are accepted, in [0, 1].
        slot_confidence: A slot's confidence: the probability of its ``first`` draft token, or the ``mean``, ``min`` or
            ``product`` over all its draft tokens.
        selection: ``threshold`` (at least one slot) or ``top_k`` (the k most confident slots). ``sequential`` (the k
            leftmost slots) and ``random`` (any k, by the seed) ignore confidence; they are baselines for the decoding
            order.
        k: Number of slots to choose, unless ``selection`` is ``threshold``; 1 by default for ``sequential`` and
            ``random``.
        infill: Method for filling rejected tails: ``mask`` predictions (the paper), ``autoregressive``, or ``bonus``.
            With ``bonus``, chosen slots are verified side by side. The model's own next token replaces a rejected draft
            (the bonus token of speculative decoding), and the rest is drafted again, so every forward commits a token.
            ``bonus`` needs a ``token_threshold`` of at least 0.5; all such values give the same text.
        num_drafts: Maximum number of drafts per slot and forward with ``bonus``. A plan then has ``num_drafts + 1``
            masks at the beginning of every slot, which later slots' masks see. ``None``: the rest of the slot.
        fused: Append the next plan's masks to a verification. If all drafts are accepted, the next round needs no
            forward to plan; otherwise the masks are discarded. Exact: saves forwards, never changes the text.
        infill_layout: Layout of ``mask`` infill; changes positions, never the text. ``reference``: one row per slot, as
            in the released program. ``packed``: a single row, without copies of context and cached tokens.
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
        """Check the options, alone and together."""
        super().__post_init__()
        if self.infill == "bonus":
            fix = "raise it, or use another infill"
            expected = "at least 0.5 with infill 'bonus'"
            require(self.token_threshold >= 0.5, "token_threshold", expected, self.token_threshold, fix)
        else:
            fix = "leave it out, or set infill to 'bonus'"
            require(self.num_drafts is None, "num_drafts", "null without infill 'bonus'", self.num_drafts, fix)
        fix = "set k with selection 'top_k', and never with 'threshold'"
        if self.selection == "threshold":
            require(self.k is None, "k", "null", self.k, fix)
        else:
            is_optional = self.selection != "top_k"
            is_valid = is_optional if self.k is None else is_number(self.k, int) and self.k >= 1
            expected = f"an integer of at least 1 with selection {self.selection!r}"
            require(is_valid, "k", expected, self.k, fix)

    def check(self, sampling: SamplingParams) -> None:
        """Refuse more serial blocks than slots."""
        require_serial_blocks(self.num_serial_blocks or 1, self.slot_size, sampling)

    def adapt_to(self, sampling: SamplingParams) -> ReFusion:
        """Return the decoder with no more serial blocks than slots."""
        if self.num_serial_blocks is None:
            return self
        num_slots = -(-sampling.max_new_tokens // self.slot_size)
        return replace(self, num_serial_blocks=min(self.num_serial_blocks, num_slots))

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> SlotState:
        """Create a canvas with whole slots, rounded up to equal serial blocks after the last given token."""
        kind = bonus.BonusState if self.infill == "bonus" else SlotState
        return kind.cut(prompt, sampling, special_tokens, self.slot_size, self.num_serial_blocks or 2)

    def step(self, state: SlotState) -> Steps[None]:  # type: ignore[override]
        """Run a round: plan, verify together, and fill in parallel if the first slot is not accepted."""
        if isinstance(state, bonus.BonusState):
            yield from bonus.step(state, self._open, self._masks, num_drafts=self.num_drafts, fused=self.fused)
            return
        yield from self._open(state)
        yield from self._verify(state, "verify")
        if not state.open[0].is_complete:
            yield from self._fill(state)
        state.close()

    def _open(self, state: SlotState) -> Steps[None]:
        """Choose slots by a plan and open them with its drafts. The LM head runs only as far as the choice needs.

        If no plan was made ahead, a forward feeds masks for all remaining slots in the serial block.
        """
        draw = state.draw
        slots = state.blocks[0]
        if state.planned is None:
            branch = self._masks(state, slots, num_seen=state.num_cached, write_at=state.num_cached)
            [state.planned] = yield state.forward("plan", [branch], draw)
            state.num_cached += branch.draft_at[0]  # the tokens before the masks
        plan = state.planned
        state.planned = None
        state.num_plans += 1
        bounds = state.bounds(slots, self._num_masks)
        all_read = len(plan.tokens) == bounds[-1]
        groups = [slice(*group) for group in pairwise(bounds if all_read else range(len(bounds)))]
        confidence = _CONFIDENCES[self.slot_confidence]
        confidences = [confidence(plan.probabilities[group]) for group in groups]
        chosen = self._select(state, confidences)
        drafts = [plan.tokens[groups[i]] for i in chosen]
        if not all_read:
            num_known = len(state.branches[-1].tokens) - bounds[-1]
            rest = [range(num_known + bounds[i] + 1, num_known + bounds[i + 1]) for i in chosen]
            draft_at = (*[()] * (len(state.branches) - 1), [*chain(*rest)])
            readings = yield MoreDrafts(draft_at=draft_at, draw=replace(draw, with_probability=False))
            following = iter(readings[-1].tokens)
            drafts = [[*first, *islice(following, len(more))] for first, more in zip(drafts, rest, strict=True)]
        write_at = state.num_cached
        for i, tokens in zip(chosen, drafts, strict=True):
            places = state.slots[slots[i]]
            state.open.append(OpenSlot(slots[i], places, write_at, tokens))
            write_at += len(places)

    def _select(self, state: SlotState, confidences: Sequence[float]) -> list[int]:
        """Return the slots to open in the serial block, in text order.

        Args:
            state: The state, after planning the block.
            confidences: The slots' confidences, in text order; ties go to the earlier slot.
        """
        if self.selection == "threshold":
            return above_or_best(confidences, self.slot_threshold)
        ranked = most_certain(confidences)
        if self.selection == "sequential":
            ranked.sort()
        elif self.selection == "random":
            key = ("slot_order", state.sampling.seed, state.prompt.id, state.num_plans)
            ranked.sort(key=lambda i: stable_key(*key, state.blocks[0][i]))
        return sorted(ranked[: self.k or 1])

    def _verify(self, state: SlotState, phase: str) -> Steps[None]:
        """Feed all open slots' tokens in text order, and accept every slot's proposals up to the first failure.

        If ``fused``, the next plan's masks follow. They see the tokens up to the first EOS, as if all passed.
        """
        start = state.num_cached
        tokens = [token for slot in state.open for token in slot.tokens]
        branch = Branch(
            tokens=tokens,
            positions=[state.prompt_length + place for slot in state.open for place in slot.places],
            visible=((0, start),),
            write_at=start,
            score_at=[
                (slot.write_at - start + offset - 1, slot.tokens[offset])
                for slot in state.open
                for offset in range(slot.num_accepted, len(slot.tokens))
            ],
        )
        eos = state.first_eos(tokens)
        num_seen = len(tokens) if eos is None else eos + 1
        reached = [slot for slot in state.open if slot.write_at < start + num_seen]
        blocks = state.remaining_blocks(reached, ends=eos is not None) if self.fused else []
        write_at = start + len(tokens)
        plan = [self._masks(state, block, num_seen=start + num_seen, write_at=write_at) for block in blocks[:1]]
        readings = yield state.forward(phase + "+plan" * len(plan), [branch, *plan], state.draw)
        scores = iter(readings[0].scores)
        for slot in state.open:
            state.accept(slot, [*islice(scores, len(slot.tokens) - slot.num_accepted)], self.token_threshold)
        if plan and all(slot.is_complete for slot in reached):  # the masks saw no draft that was rejected
            state.planned = readings[-1]

    def _fill(self, state: SlotState) -> Steps[None]:
        """Fill all open slots in parallel and keep their cache entries unchanged: ReFusion's reuse."""
        if self.infill == "mask":
            yield from infill_by_masks(state, self.token_threshold, packed=self.infill_layout == "packed")
        else:
            yield from infill_autoregressively(state, self.token_threshold)

    def _masks(self, state: SlotState, slots: Sequence[int], *, num_seen: int, write_at: int) -> Branch:
        """Return the branch that plans slots; the first plan also feeds the known tokens.

        Args:
            state: The prompt's state.
            slots: The slots' numbers.
            num_seen: Number of cache entries that the masks see.
            write_at: Index of the branch's first cache entry.
        """
        known = () if state.num_plans else state.known_tokens[state.num_cached :]
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
        """Number of masks per slot in a plan; ``None``: a mask per token."""
        return None if self.num_drafts is None else 1 + self.num_drafts
