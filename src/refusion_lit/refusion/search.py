"""SlotSearch: searches for the best decoding order of a response's slots by tree search or beam search.

Source: McDiffuSE (arXiv 2602.12586), after secondary descriptions, since the paper was not available: slots are
actions, filling is deterministic, confidence is prior and reward, rollouts look ahead. Choices that these descriptions
leave open: an unvisited slot has its parent's mean value; ties go to the higher prior and then to the left; the search
restarts after each committed slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from sys import float_info
from typing import ClassVar, Literal, get_args

from refusion_lit.engine.decoder import Decoder, ModelRequirements
from refusion_lit.engine.requests import Branch, Draw, Steps
from refusion_lit.refusion.search_tree import Confidence, Node, SearchState
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require, require_at_least, require_choice, require_number, require_probability


@dataclass(frozen=True, kw_only=True)
class SlotSearch(Decoder):
    """Decodes slots one after the other in the best order found by a search; for ReFusion's models.

    A slot is filled from left to right: its first token is predicted by its mask, the others as next tokens. Slots that
    the search tries and discards cost forwards, which count like all others. With ``temperature > 0`` first tokens are
    sampled.

    Attributes:
        slot_size: Tokens per slot, K in the paper.
        num_serial_blocks: Number of blocks into which the response is cut; they are decoded strictly left to right.
            Holes before given tokens are cut into the same number of blocks, which are decoded first, as in
            :class:`ReFusion`.
        selection: ``tree_search`` commits one slot a step, the most visited one of ``num_simulations``. ``beam`` orders
            a serial block at once: it keeps the ``beam_size`` partial orders with the highest mean log-probability,
            those with different slots first.
        num_simulations: Simulations per committed slot. 1 with ``exploration`` 0 decodes in the order of certainty,
            without search.
        exploration: Weight of the prior against the value, c of PUCT; 0 or more.
        prior_temperature: Sharpens (below 1) or flattens the prior, the softmax of the first tokens'
            log-probabilities.
        horizon: Number of slots that a simulation decodes, at least 1; those after the first one follow in the order of
            certainty.
        immediate_weight: Weight of the first slot's confidence in a simulation's value, lambda in [0, 1]; the rest is
            the mean confidence of the slots after it.
        confidence: Confidence of a decoded slot: that of its ``first`` token, or the ``mean`` or ``geometric`` mean.
        beam_size: Number of partial orders that are kept.
        max_candidates: Number of slots that are tried after a node: the most certain ones, and for ``tree_search`` also
            the leftmost.
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(
        attention="causal", predictions=("mask", "next_token_in_slot")
    )

    slot_size: int = 8
    num_serial_blocks: int = 1
    selection: Literal["tree_search", "beam"] = "tree_search"
    num_simulations: int = 8
    exploration: float = 1.0
    prior_temperature: float = 0.5
    horizon: int = 2
    immediate_weight: float = 0.5
    confidence: Confidence = "mean"
    beam_size: int = 4
    max_candidates: int = 4

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        for name in ("slot_size", "num_serial_blocks", "num_simulations", "horizon", "beam_size", "max_candidates"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("exploration", self.exploration, 0.0)
        require_number("prior_temperature", self.prior_temperature, "(0, inf)")
        require_probability("immediate_weight", self.immediate_weight)
        require_choice("selection", self.selection, ("tree_search", "beam"))
        require_choice("confidence", self.confidence, get_args(Confidence))

    def check(self, sampling: SamplingParams) -> None:
        """Refuse more serial blocks than slots."""
        num_slots = -(-sampling.max_new_tokens // self.slot_size)
        expected = f"at most {num_slots} ({sampling.max_new_tokens} new tokens in slots of {self.slot_size})"
        fix = "use fewer serial blocks, smaller slots or more new tokens"
        require(self.num_serial_blocks <= num_slots, "num_serial_blocks", expected, self.num_serial_blocks, fix)

    def num_shareable(self, prompt_length: int, num_common: int) -> int:  # noqa: ARG002
        """Return all common tokens: the first forward reads masks after the prompt."""
        return num_common

    def refusal(self, prompt: Prompt) -> None:
        """Refuse nothing: given tokens join the context, at their own positions."""

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> SearchState:
        """Create a canvas of slots, rounded up to equal serial blocks after the last given token."""
        sizes, root = (self.slot_size, self.num_serial_blocks), Node(None, -1, [], [], 0, [])
        return SearchState.cut(prompt, sampling, special_tokens, *sizes, root=root)

    def step(self, state: SearchState) -> Steps[None]:  # type: ignore[override]
        """Search and commit: one slot, or with a beam the whole serial block."""
        if not state.root.remaining:
            state.begin_block()
        search = self._tree_search if self.selection == "tree_search" else self._beam_search
        state.commit_path((yield from search(state)))
        is_last = state.next_block == len(state.blocks)
        state.finished = not state.root.remaining and (is_last or state.prefix_ends)

    # --- search ----------------------------------------------------------------------------------------------

    def _tree_search(self, state: SearchState) -> Steps[Node]:
        """Return the most visited child of the root after all simulations."""
        root = state.root
        for _ in range(self.num_simulations):
            yield from self._simulate(state, root)
        visited = [child for child in root.children.values() if child.num_visits]
        return max(visited, key=lambda child: (child.num_visits, child.mean_value, -child.slot))

    def _simulate(self, state: SearchState, root: Node) -> Steps[None]:
        """Run one simulation: select down to an unvisited slot, roll out from there, and back up the value."""
        node = root
        while node is root or (node.num_visits and node.remaining):
            yield from self._plan(state, [node])
            node = yield from self._child(state, node, self._select(node))
        value, ahead, last = node.confidence(self.confidence), [], node
        while last.remaining and len(ahead) < self.horizon - 1:
            yield from self._plan(state, [last])
            last = yield from self._child(state, last, self._candidates(last)[0])
            ahead.append(last.confidence(self.confidence))
        if ahead:
            value = self.immediate_weight * value + (1 - self.immediate_weight) * sum(ahead) / len(ahead)
        for passed in node.path:
            passed.num_visits += 1
            passed.value += value

    def _select(self, node: Node) -> int:
        """Return the slot to try next: the highest value plus PUCT's bonus for probable and rarely tried ones."""
        assert node.drafts is not None
        candidates = sorted({*self._candidates(node)[: self.max_candidates], node.remaining[0]})
        logs = [log(max(node.drafts[slot][1], float_info.min)) / self.prior_temperature for slot in candidates]
        weights = [exp(value - max(logs)) for value in logs]
        visits = {slot: child.num_visits for slot, child in node.children.items()}
        factor = self.exploration * sqrt(max(1, sum(visits.values()))) / sum(weights)

        def rank(i: int) -> tuple[float, float, int]:
            slot = candidates[i]
            seen = visits.get(slot, 0)
            value = node.children[slot].mean_value if seen else node.mean_value
            return value + factor * weights[i] / (1 + seen), weights[i], -slot

        return candidates[max(range(len(candidates)), key=rank)]

    def _beam_search(self, state: SearchState) -> Steps[Node]:
        """Return the best order of all remaining slots that a beam finds."""
        beams = [state.root]
        while growing := [node for node in beams if node.remaining]:
            yield from self._plan(state, growing)
            pairs = [(node, slot) for node in growing for slot in self._candidates(node)[: self.max_candidates]]
            children = yield from self._fill(state, pairs)
            pool = [*(node for node in beams if not node.remaining), *children]
            seen: set[frozenset[int]] = set()
            best, others = [], []
            for node in sorted(pool, key=lambda node: (-node.score(), node.slots)):
                slots = frozenset(node.slots)
                (others if slots in seen else best).append(node)
                seen.add(slots)
            beams = [*best, *others][: self.beam_size]
        return max(beams, key=lambda node: node.score())

    # --- forwards --------------------------------------------------------------------------------------------

    def _candidates(self, node: Node) -> list[int]:
        """Return the remaining slots, those with the most certain first token first."""
        drafts = node.drafts
        assert drafts is not None
        return sorted(node.remaining, key=lambda slot: (-drafts[slot][1], slot))

    def _plan(self, state: SearchState, nodes: Sequence[Node]) -> Steps[None]:
        """Draft the first token of each remaining slot after each of the nodes, in one forward."""
        nodes, branches, at = [node for node in nodes if node.drafts is None], [], state.top
        if not nodes:
            return
        for node in nodes:
            if unfed := node.tokens[node.num_fed :]:
                positions, write_at = node.positions[node.num_fed : len(node.tokens)], node.write_at + node.num_fed
                branches.append(Branch(tokens=unfed, positions=positions, visible=node.visible, write_at=write_at))
                node.num_fed = len(node.tokens)
            positions, firsts = state.positions(node.remaining), state.bounds(node.remaining)[:-1]
            masks = [state.mask_token_id] * len(positions)
            branches.append(
                Branch(tokens=masks, positions=positions, visible=node.visible, write_at=at, draft_at=firsts)
            )
            at += len(positions)
        draw = Draw(sampling=state.sampling, round=state.num_plans)
        state.num_plans += 1
        readings = yield state.forward("plan", branches, draw)
        planned = [reading for reading, branch in zip(readings, branches, strict=True) if branch.draft_at]
        for node, reading in zip(nodes, planned, strict=True):
            drafts = zip(reading.tokens, reading.probabilities, strict=True)
            node.drafts = dict(zip(node.remaining, drafts, strict=True))

    def _child(self, state: SearchState, node: Node, slot: int) -> Steps[Node]:
        """Return the child node of a slot; fill the slot on the first visit."""
        if slot not in node.children:
            yield from self._fill(state, [(node, slot)])
        return node.children[slot]

    def _fill(self, state: SearchState, pairs: Sequence[tuple[Node, int]]) -> Steps[list[Node]]:
        """Fill slots after nodes token by token, all at once: each child sees its own path."""
        draw = Draw(sampling=state.sampling.greedy(), round=state.num_plans)
        children = []
        for node, slot in pairs:
            assert node.drafts is not None
            token, probability = node.drafts[slot]
            left = [other for other in node.remaining if other != slot]
            child = Node(node, slot, state.positions([slot]), [token], state.top, left, [probability])
            node.children[slot] = child
            children.append(child)
            state.top += len(child.positions)
        while growing := [child for child in children if not self._is_complete(state, child)]:
            branches = [
                Branch(
                    tokens=child.tokens[-1:], positions=[child.positions[child.num_fed]], visible=child.visible,
                    write_at=child.write_at + child.num_fed, shift=1, draft_at=(0,),
                )
                for child in growing
            ]  # fmt: skip
            readings = yield state.forward("next_token", branches, draw)
            for child, reading in zip(growing, readings, strict=True):
                child.num_fed += 1
                child.tokens += reading.tokens
                child.probabilities += reading.probabilities
        return children

    def _is_complete(self, state: SearchState, child: Node) -> bool:
        """Whether a slot is full or has an end of sequence; after an end, only slots before it may follow."""
        if not child.ends and state.first_eos(child.tokens) is not None:
            child.ends, child.remaining = True, [slot for slot in child.remaining if slot < child.slot]
        return child.ends or len(child.tokens) == len(child.positions)
