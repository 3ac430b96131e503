"""Partial orders of slots as a tree: each node is a slot decoded after those on its path, with its cache entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, fsum, log
from sys import float_info
from typing import Literal

from refusion_lit.engine.requests import Branch, Compaction, Draw, Forward
from refusion_lit.refusion.slots import SlotState

Confidence = Literal["first", "mean", "geometric"]
"""Confidence of a decoded slot: of its first token, or the arithmetic or geometric mean over its tokens."""


@dataclass(slots=True, eq=False)
class Node:
    """Node of the search tree: a slot decoded after those on its path; the root holds text that is not cached yet.

    Attributes:
        parent: The node before it; ``None`` at the root.
        slot: Its slot; -1 at the root.
        positions: Positions of its tokens, including those of a slot that are not filled yet.
        tokens: Its tokens.
        write_at: Cache index of its first token; the other tokens follow.
        remaining: Slots that may be decoded next, in text order.
        probabilities: Probabilities of its tokens when they were drawn.
        ends: Whether its last token is an end of sequence.
        num_fed: Number of leading tokens whose keys and values are stored.
        drafts: First token of each remaining slot and its probability, by slot; ``None`` before the plan.
        children: Decoded slots, by slot.
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
        """This node and those before it, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def visible(self) -> tuple[tuple[int, int], ...]:
        """Cache entries of the context and of all tokens on the path that are stored."""
        nodes = list(self.path)
        ranges = [(node.write_at, node.write_at + node.num_fed) for node in reversed(nodes)]
        return ((0, nodes[-1].write_at), *ranges)

    @property
    def slots(self) -> list[int]:
        """Slots on the path in the order they were decoded in."""
        return [node.slot for node in self.path if node.parent is not None][::-1]

    @property
    def mean_value(self) -> float:
        """Mean value of its simulations; 0 before the first."""
        return self.value / self.num_visits if self.num_visits else 0.0

    def confidence(self, kind: Confidence) -> float:
        """Return the confidence of its slot, in [0, 1]; tokens after an end of sequence do not count."""
        if kind == "first":
            return self.probabilities[0]
        if kind == "mean":
            return fsum(self.probabilities) / len(self.probabilities)
        return exp(mean_log(self.probabilities))

    def score(self) -> float:
        """Return the mean log-probability of all tokens on the path, in nats."""
        return mean_log([p for node in self.path for p in node.probabilities] or [1.0])


@dataclass(kw_only=True)
class SearchState(SlotState):
    """State of a search.

    Attributes:
        root: Root of the search tree: the committed text and the remaining slots of the current serial block.
        top: First free cache index after the context and the tree.
        num_plans: Number of plans made so far; keys their noise.
        keep: Pending compaction of the cache by the next forward.
    """

    root: Node
    top: int = 0
    num_plans: int = 0
    keep: Compaction | None = None

    def forward(self, phase: str, branches: Sequence[Branch], draw: Draw) -> Forward:
        """Return a forward of branches in one row, after the pending compaction."""
        keep, self.keep = self.keep, None
        return Forward(phase=phase, branches=tuple(branches), draw=draw, packed=True, keep=keep)

    def begin_block(self) -> None:
        """Give the root the slots of the next serial block and, before the first one, the text that is not cached."""
        root = self.root
        root.remaining, root.drafts = self.upcoming_block(), None
        if self.next_block == 0:  # the engine has copied the shared tokens: do not feed them
            root.write_at, self.top = self.num_shared, len(self.known)
            new = self.known[self.num_shared :]
            root.tokens, root.positions = [token for token, _ in new], [position for _, position in new]
        self.next_block += 1

    def commit_path(self, leaf: Node) -> None:
        """Make the slots on a path final; the leaf becomes the root of the next search."""
        path = [*leaf.path][::-1]
        for node in path[1:]:
            self.commit(self.slots[node.slot][: len(node.tokens)], node.tokens)
        stored = [node.write_at + i for node in path for i in range(node.num_fed)]
        num_leading = path[0].write_at
        if self.keep is None:
            self.keep = Compaction(num_leading, stored)
        assert not stored or self.keep.indices == stored, "the compaction before has not been made yet"
        length = num_leading + len(stored)
        unfed, positions = leaf.tokens[leaf.num_fed :], leaf.positions[leaf.num_fed :]
        self.root = Node(None, -1, positions, unfed, length, leaf.remaining, drafts=leaf.drafts)
        self.top = length + len(unfed)


def mean_log(probabilities: list[float]) -> float:
    """Return the mean logarithm of probabilities; 0 counts as the smallest positive number."""
    return fsum(log(max(p, float_info.min)) for p in probabilities) / len(probabilities)
