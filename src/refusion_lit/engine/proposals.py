"""Proposals for rejection sampling: drafts with their distributions, which stay on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.engine.requests import Draw
from refusion_lit.engine.sampling import filter_logits, keep_or_draw
from refusion_lit.modeling.transfer import to_device


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft and the distribution it was drawn from, for rejection sampling.

    Attributes:
        token: The draft.
        probabilities: The distribution, after temperature and filters; stays on the model's device.
    """

    token: int
    probabilities: Float[Tensor, " vocab"]


class Proposals:
    """Draws the tokens of a group of reads: verifies given proposals by rejection sampling, or makes new proposals.

    Args:
        given: The proposal for each draft of the group; ``None`` where there is none.
    """

    def __init__(self, given: Sequence[Proposal | None]) -> None:
        self._given = given
        self._distributions: list[Tensor] = []
        self._num_drawn = 0

    def draw(self, logits: Float[Tensor, "draft vocab"], draw: Draw, keys: Int[Tensor, " draft"]) -> Tensor:
        """Draw the group's tokens for the next rows of logits; for the arguments see :func:`draw_tokens`."""
        probabilities = filter_logits(logits, draw.sampling, top_p_first=draw.top_p_first).softmax(-1)
        given = self._given[self._num_drawn : self._num_drawn + len(logits)]
        self._num_drawn += len(logits)
        if draw.proposes:
            self._distributions += probabilities.unbind()
        drafts = to_device([0 if proposal is None else proposal.token for proposal in given], logits.device)
        nothing = logits.new_zeros(logits.shape[-1])
        proposed = [nothing if proposal is None else proposal.probabilities for proposal in given]
        return keep_or_draw(probabilities, keys, drafts, torch.stack(proposed))

    def made(self, tokens: Sequence[int]) -> Iterator[Proposal]:
        """Yield the proposals of the group's drafts, given their tokens; nothing if the draw does not propose."""
        yield from map(Proposal, tokens, self._distributions)
