"""Which tokens a response may have; :mod:`refusion_lit.types` exports it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ConstraintState(ABC):
    """What is known of a constraint while one response is decoded.

    Arguments of both methods: ``place`` counts the tokens of the response; ``before`` are those that the drawn token
    follows, drafts that are being verified and masks included, if the decoder draws from left to right.
    """

    @abstractmethod
    def allowed(self, place: int, before: Sequence[int]) -> torch.Tensor | None:
        """Return which tokens may stand at a place, bool [vocab] on the CPU; ``None``: all may."""

    def settle(self, place: int, before: Sequence[int], token: int) -> int:  # noqa: ARG002
        """Return the token to take in place of a drawn one; by default the drawn one."""
        return token


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Which responses a prompt may get, token by token; several prompts may share it.

    Attributes:
        begin: Returns the state for a response of at most as many tokens as its argument says.
        left_to_right: Whether it needs the tokens before a place, which only decoders from left to right know.
    """

    begin: Callable[[int], ConstraintState]
    left_to_right: bool
