"""SlotSearch: finds the best order in which to decode slots, by tree search or beam search.

Source: McDiffuSE (arXiv 2602.12586), after secondary descriptions, because the paper was not available. In the tree
search, actions are slots, filling a slot is deterministic, confidence is both prior and reward, and rollouts look
ahead. The descriptions leave some choices open. Here an unvisited slot has the mean value of its parent, ties go to the
higher prior and then to the left, and the search restarts after every committed slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, fsum, log, sqrt
from sys import float_info
from typing import Literal

from refusion_lit.engine.decoder import Decoder, ModelRequirements
from refusion_lit.engine.requests import Branch, Compaction, Draw, Forward, Steps
from refusion_lit.refusion.slots import SlotState, require_serial_blocks
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens

EXPLORATION = 1.0
"""Weight of the prior against the value, c of PUCT."""

PRIOR_TEMPERATURE = 0.5
"""Temperature of the prior, the softmax of the first tokens' log-probabilities."""

IMMEDIATE_WEIGHT = 0.5
"""Weight lambda of the first slot's confidence in a simulation's value; later slots share the rest."""


@dataclass(slots=True, eq=False)
class Node:
    """A slot in the search tree, decoded after the slots on its path. The root holds uncached text.

    Attributes:
        parent: The previous node; ``None`` at the root.
        slot: Index of the slot; -1 at the root.
        positions: Positions of the slot, filled or not.
        tokens: Tokens decoded so far.
        write_at: Cache index of the first token; the other tokens follow.
        remaining: Slots that may be decoded next, in text order.
        probabilities: Probabilities of the tokens when they were drawn.
        ends: Whether the last token is an EOS token.
        num_fed: Number of leading tokens in the KV cache.
        drafts: First token and its probability, by remaining slot; ``None`` before the plan.
        children: Child nodes, by slot.
        num_visits: Number of simulations through this node.
        value: Sum of the values of these simulations.
    """

    parent: Node | None
    slot: int
    positions: Sequence[int]
    tokens: list[int]
    write_at: int
    remaining: list[int]
    probabilities: list[float] = field(default_factory=list)
    ends: bool = False
    num_fed: int = 0
    drafts: dict[int, tuple[int, float]] | None = None
    children: dict[int, Node] = field(default_factory=dict)
    num_visits: int = 0
    value: float = 0.0

    @property
    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def visible(self) -> tuple[tuple[int, int], ...]:
        """Cache ranges of the context and of the stored tokens on the path."""
        nodes = list(self.path)
        ranges = [(node.write_at, node.write_at + node.num_fed) for node in reversed(nodes)]
        return ((0, nodes[-1].write_at), *ranges)

    @property
    def slots(self) -> list[int]:
        """Slots on the path, in decoding order."""
        return [node.slot for node in self.path if node.parent is not None][::-1]

    @property
    def mean_value(self) -> float:
        """Mean value of the simulations; 0 before the first simulation."""
        return self.value / self.num_visits if self.num_visits else 0.0

    @property
    def confidence(self) -> float:
        """Mean probability of the tokens up to an EOS token."""
        return fsum(self.probabilities) / len(self.probabilities)

    def score(self) -> float:
        """Return the mean log-probability over all tokens on the path, in nats."""
        probabilities = [p for node in self.path for p in node.probabilities] or [1.0]
        # 0 counts as the smallest positive number.
        return fsum(log(max(p, float_info.min)) for p in probabilities) / len(probabilities)


@dataclass(kw_only=True)
class SearchState(SlotState):
    """State of a search.

    Attributes:
        root: Root of the search tree: the committed text, and the remaining slots in the current serial block.
        top: First free cache index after the context and the tree.
        keep: Compaction of the cache that the next forward will do.
    """

    root: Node = field(default_factory=lambda: Node(None, -1, [], [], 0, []))
    top: int = 0
    keep: Compaction | None = None

    def forward(self, phase: str, branches: Sequence[Branch], draw: Draw) -> Forward:
        """Return a forward over branches in one row, after the pending compaction."""
        keep = self.keep
        self.keep = None
        return replace(super().forward(phase, branches, draw), keep=keep)

    def begin_block(self) -> None:
        """Give the root the slots of the next serial block, and before the first block the uncached text."""
        root = self.root
        root.remaining = self.blocks.pop(0)
        root.drafts = None
        if self.top == 0:  # the engine has copied the shared tokens: do not feed them
            root.write_at = self.num_shared
            self.top = len(self.known_tokens)
            new = self.known_tokens[self.num_shared :]
            root.tokens = [token for token, _ in new]
            root.positions = [position for _, position in new]

    def commit_path(self, leaf: Node) -> None:
        """Make the slots on a path final; the leaf becomes the root of the next search."""
        path = [*leaf.path][::-1]
        for node in path[1:]:
            self.commit(self.slots[node.slot][: len(node.tokens)], node.tokens)
        stored = [node.write_at + i for node in path for i in range(node.num_fed)]
        num_leading = path[0].write_at
        if self.keep is None:
            self.keep = Compaction(num_leading, stored)
        assert not stored or self.keep.indices == stored, "the previous compaction is still pending"
        length = num_leading + len(stored)
        unfed = leaf.tokens[leaf.num_fed :]
        positions = leaf.positions[leaf.num_fed :]
        self.root = Node(None, -1, positions, unfed, length, leaf.remaining, drafts=leaf.drafts)
        self.top = length + len(unfed)


@dataclass(frozen=True, kw_only=True)
class SlotSearch(Decoder):
    """Decodes slots one by one, in the best order found by a search; for ReFusion models.

    A slot is filled from left to right: a mask predicts the first token, and next-token prediction the other tokens.
    Slots that the search tries and discards cost forwards, which are counted, too. With ``temperature > 0``, first
    tokens are sampled.

    Attributes:
        slot_size: Tokens per slot, K in the paper.
        num_serial_blocks: Number of blocks into which the response is cut; blocks are decoded strictly left to right.
            Spans before given tokens are cut into the same number of blocks, which are decoded first, as in
            :class:`ReFusion`.
        selection: ``tree_search`` commits a slot per step, the most visited slot after ``num_simulations``. ``beam``
            orders a whole serial block: it keeps the ``beam_size`` partial orders with the highest mean
            log-probability, and prefers partial orders of different slots.
        num_simulations: Simulations per committed slot; 1 decodes in the order of confidence, without search.
        horizon: Number of slots that a simulation decodes, at least 1; slots after the first follow in the order of
            confidence.
        beam_size: Number of partial orders that the beam keeps.
        max_candidates: Number of slots to try after a node, the most confident slots; ``tree_search`` adds the leftmost
            slot.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> decoder = SlotSearch(slot_size=4, num_simulations=1, horizon=1)  # no search
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=decoder, max_new_tokens=24)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=46;56+78=134;', 20, 21)
    """

    requires = ModelRequirements(attention="causal", predictions=("mask", "next_token_in_slot"))
    shares = "all"
    refuses = None  # given tokens join the context, at their own positions
    stop_at_eos = False  # serial blocks are decoded whole

    ranges = dict.fromkeys(
        ("slot_size", "num_serial_blocks", "num_simulations", "horizon", "beam_size", "max_candidates"), 1
    )
    slot_size: int = 8
    num_serial_blocks: int = 1
    selection: Literal["tree_search", "beam"] = "tree_search"
    num_simulations: int = 8
    horizon: int = 2
    beam_size: int = 4
    max_candidates: int = 4

    def check(self, sampling: SamplingParams) -> None:
        """Refuse more serial blocks than slots."""
        require_serial_blocks(self.num_serial_blocks, self.slot_size, sampling)

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> SearchState:
        """Create a canvas of slots, rounded up to equal serial blocks after the last given token."""
        return SearchState.cut(prompt, sampling, special_tokens, self.slot_size, self.num_serial_blocks)

    def step(self, state: SearchState) -> Steps[None]:  # type: ignore[override]
        """Search, then commit a slot, or with a beam the whole serial block."""
        if not state.root.remaining:
            state.begin_block()
        search = self._tree_search if self.selection == "tree_search" else self._beam_search
        state.commit_path((yield from search(state)))
        state.finished = not state.root.remaining and (not state.blocks or state.prefix_ends)

    def _tree_search(self, state: SearchState) -> Steps[Node]:
        """Run all simulations, and return the most visited child of the root."""
        root = state.root
        for _ in range(self.num_simulations):
            yield from self._simulate(state, root)
        visited = [child for child in root.children.values() if child.num_visits]
        return max(visited, key=lambda child: (child.num_visits, child.mean_value, -child.slot))

    def _simulate(self, state: SearchState, root: Node) -> Steps[None]:
        """Run a simulation: descend to an unvisited slot, roll out, and back up the value."""
        node = root
        while node is root or (node.num_visits and node.remaining):
            yield from self._plan(state, [node])
            node = yield from self._child(state, node, self._select(node))
        value = node.confidence
        ahead: list[float] = []
        last = node
        while last.remaining and len(ahead) < self.horizon - 1:
            yield from self._plan(state, [last])
            last = yield from self._child(state, last, self._candidates(last)[0])
            ahead.append(last.confidence)
        if ahead:
            value = IMMEDIATE_WEIGHT * value + (1 - IMMEDIATE_WEIGHT) * sum(ahead) / len(ahead)
        for ancestor in node.path:
            ancestor.num_visits += 1
            ancestor.value += value

    def _select(self, node: Node) -> int:
        """Return the slot with the highest PUCT score: its value, and a bonus if it is probable and rarely tried."""
        assert node.drafts is not None
        candidates = sorted({*self._candidates(node)[: self.max_candidates], node.remaining[0]})
        logs = [log(max(node.drafts[slot][1], float_info.min)) / PRIOR_TEMPERATURE for slot in candidates]
        weights = [exp(value - max(logs)) for value in logs]
        visits = {slot: child.num_visits for slot, child in node.children.items()}
        factor = EXPLORATION * sqrt(max(1, sum(visits.values()))) / sum(weights)

        def rank(i: int) -> tuple[float, float, int]:
            slot = candidates[i]
            num_visits = visits.get(slot, 0)
            value = node.children[slot].mean_value if num_visits else node.mean_value
            return value + factor * weights[i] / (1 + num_visits), weights[i], -slot

        return candidates[max(range(len(candidates)), key=rank)]

    def _beam_search(self, state: SearchState) -> Steps[Node]:
        """Search for the best order of all remaining slots with a beam; return its last node."""
        beams = [state.root]
        while growing := [node for node in beams if node.remaining]:
            yield from self._plan(state, growing)
            pairs = [(node, slot) for node in growing for slot in self._candidates(node)[: self.max_candidates]]
            children = yield from self._fill(state, pairs)
            pool = [*(node for node in beams if not node.remaining), *children]
            ranked = sorted(pool, key=lambda node: (-node.score(), node.slots))
            best: dict[frozenset[int], Node] = {}  # by the slots that are filled, in any order
            for node in ranked:
                best.setdefault(frozenset(node.slots), node)
            others = [node for node in ranked if best[frozenset(node.slots)] is not node]
            beams = [*best.values(), *others][: self.beam_size]
        return max(beams, key=lambda node: node.score())

    def _candidates(self, node: Node) -> list[int]:
        """Return the remaining slots by falling confidence of their first tokens."""
        drafts = node.drafts
        assert drafts is not None
        return sorted(node.remaining, key=lambda slot: (-drafts[slot][1], slot))

    def _plan(self, state: SearchState, nodes: Sequence[Node]) -> Steps[None]:
        """Draft the first tokens of all remaining slots after the nodes, in one forward."""
        nodes = [node for node in nodes if node.drafts is None]
        if not nodes:
            return
        branches = []
        masks_at = state.top
        for node in nodes:
            if unfed := node.tokens[node.num_fed :]:
                positions = node.positions[node.num_fed : len(node.tokens)]
                write_at = node.write_at + node.num_fed
                branches.append(Branch(tokens=unfed, positions=positions, visible=node.visible, write_at=write_at))
                node.num_fed = len(node.tokens)
            positions = state.positions(node.remaining)
            firsts = state.bounds(node.remaining)[:-1]
            masks = [state.mask_token_id] * len(positions)
            branches.append(
                Branch(tokens=masks, positions=positions, visible=node.visible, write_at=masks_at, draft_at=firsts)
            )
            masks_at += len(positions)
        readings = yield state.forward("plan", branches, state.draw)
        state.num_plans += 1
        planned = [reading for reading, branch in zip(readings, branches, strict=True) if branch.draft_at]
        for node, reading in zip(nodes, planned, strict=True):
            drafts = zip(reading.tokens, reading.probabilities, strict=True)
            node.drafts = dict(zip(node.remaining, drafts, strict=True))

    def _child(self, state: SearchState, node: Node, slot: int) -> Steps[Node]:
        """Return the child node for a slot; fill the slot on the first visit."""
        if slot not in node.children:
            yield from self._fill(state, [(node, slot)])
        return node.children[slot]

    def _fill(self, state: SearchState, pairs: Sequence[tuple[Node, int]]) -> Steps[list[Node]]:
        """Fill slots after nodes token by token, in shared forwards; a child sees only its path."""
        draw = Draw(sampling=state.sampling.greedy())
        children = []
        for node, slot in pairs:
            assert node.drafts is not None
            token, probability = node.drafts[slot]
            remaining = [other for other in node.remaining if other != slot]
            child = Node(node, slot, state.positions([slot]), [token], state.top, remaining, [probability])
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
        """Whether a slot is full or has an EOS token. After an EOS token, only slots on its left may follow."""
        if not child.ends and state.first_eos(child.tokens) is not None:
            child.ends = True
            child.remaining = [slot for slot in child.remaining if slot < child.slot]
        return child.ends or len(child.tokens) == len(child.positions)
