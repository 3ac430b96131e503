"""Partial orders of slots as a tree: each node is a slot decoded after those on its path, with its cache entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, fsum, log
from sys import float_info
from typing import Literal

Confidence = Literal["first", "mean", "geometric"]
"""Confidence of a decoded slot: of its first token, or the arithmetic or geometric mean over its tokens."""


@dataclass(slots=True, eq=False)
class Node:
    """Text that is decoded after the nodes on its path: a slot, or at the root what the context does not hold yet.

    Attributes:
        parent: The node before it; ``None`` at the root.
        slot: Its slot; -1 at the root.
        start: Position of its first token.
        tokens: Its tokens.
        write_at: Cache index of its first token; the other tokens follow.
        remaining: Slots that may be decoded next, in text order.
        probabilities: Of its tokens, when they were drawn.
        ends: Whether its last token is an end of sequence.
        num_fed: First tokens whose keys and values are stored.
        drafts: First token of each remaining slot and its probability, by slot; ``None`` before the plan.
        children: Decoded slots, by slot.
        num_visits: Simulations that went through it.
        value: Sum of their values.
    """

    parent: Node | None
    slot: int
    start: int
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


def mean_log(probabilities: list[float]) -> float:
    """Return the mean logarithm of probabilities; 0 counts as the smallest positive number."""
    return fsum(log(max(p, float_info.min)) for p in probabilities) / len(probabilities)
