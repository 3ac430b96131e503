"""Draws with options: temperature, filters, guidance, templates, statistics and rejection sampling.

The greedy fast path of :mod:`~refusion_lit.engine.reading` needs none of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.engine.requests import Draw, Proposal, Read
from refusion_lit.engine.sampling import draft_statistics, draw_tokens, filter_logits, keep_or_draw, noise_keys
from refusion_lit.modeling.devices import to_device
from refusion_lit.types import SpecialTokens


@dataclass(slots=True)
class Drawn:
    """Results of a group of reads on the device, chunk by chunk.

    Attributes:
        tokens: The drafts.
        values: For each draft and each given token its probability or, if no probabilities are wanted, its logit.
        statistics: The requested statistics [statistic, draft].
        distributions: Distribution of each draft, if the draw proposes.
    """

    tokens: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)


class General:
    """Draws the drafts of a group of reads that draw in the same way.

    Args:
        reads: The group.
        special: The model's special ids.
        banned: Ids that no decoder draws.
        device: Device of the logits.
    """

    def __init__(
        self, reads: Sequence[Read], special: SpecialTokens, banned: frozenset[int], device: torch.device
    ) -> None:
        draw = reads[0].draw
        keys = [key for read in reads for key in noise_keys(read.branch, read.draft_at, read.draw, read.prompt_id)]
        proposals = [read.branch.proposals.get(offset) for read in reads for offset in read.draft_at]
        self._draw = draw
        self._vocab_size = special.vocab_size
        self._banned = to_device(sorted(banned.union(draw.forbidden)), device)
        self._ends = to_device(sorted(special.eos_token_ids), device)
        self._keys = to_device(keys, device)
        self._proposals = proposals if draw.proposes or reads[0].branch.proposals else None
        self._masks = [mask for read in reads for mask in read.allowed or [None] * len(read.draft_at)]
        self._in_span = [
            read.branch.positions[offset] + read.branch.shift < read.spans_end
            for read in reads
            for offset in read.draft_at
        ]

    def draw(self, logits: Float[Tensor, "draft vocab"], first: int, drawn: Drawn) -> Int[Tensor, " draft"]:
        """Draw a token from each row; append statistics and distributions.

        Args:
            logits: Logits of some of the group's drafts, not changed.
            first: Number of the first one among all drafts of the group.
            drawn: Receives statistics and distributions.
        """
        draw = self._draw
        stop = first + len(logits)
        in_span = [row for row, inside in enumerate(self._in_span[first:stop]) if inside]
        allowed = logits.index_fill(-1, self._banned, -math.inf)
        allowed[:, self._vocab_size :] = -math.inf
        self._end_no_span(allowed, in_span)
        for row, mask in enumerate(self._masks[first:stop]):
            if mask is not None:
                allowed[row, : self._vocab_size].masked_fill_(~mask.to(logits.device), -math.inf)
        keys = self._keys[first:stop]
        if self._proposals is None:
            tokens = draw_tokens(allowed, draw.sampling, keys, top_p_first=draw.top_p_first)
        else:
            tokens = _propose_or_verify(allowed, draw, keys, self._proposals[first:stop], drawn)
        if draw.statistics:
            seen = logits.index_fill(-1, to_device(draw.forbidden, logits.device), -math.inf)
            self._end_no_span(seen, in_span)
            filtered = filter_logits(seen, draw.sampling, top_p_first=draw.top_p_first)
            drawn.statistics.append(draft_statistics(draw.statistics, seen, filtered, tokens, draw.confidence_dtype))
        return tokens

    def _end_no_span(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Forbid ends of sequence in rows that fill a template's span."""
        if rows:
            logits[to_device(rows, logits.device)[:, None], self._ends] = -math.inf


def _propose_or_verify(
    logits: Float[Tensor, "draft vocab"], draw: Draw, keys: Int[Tensor, " draft"],
    proposals: Sequence[Proposal | None], drawn: Drawn,
) -> Int[Tensor, " draft"]:  # fmt: skip
    """Draw by rejection sampling: keep proposals or replace them; where there is none, draw from the distribution."""
    probabilities = filter_logits(logits, draw.sampling, top_p_first=draw.top_p_first).softmax(-1)
    if draw.proposes:
        drawn.distributions += probabilities.unbind()
    tokens = to_device([0 if proposal is None else proposal.token for proposal in proposals], logits.device)
    nothing = logits.new_zeros(logits.shape[-1])
    proposed = [nothing if proposal is None else proposal.probabilities for proposal in proposals]
    return keep_or_draw(probabilities, keys, tokens, torch.stack(proposed))


def finite(logits: Tensor) -> Tensor:
    """Replace NaN by the lowest number and clamp infinities; -inf stays free to mark ids that are left out."""
    lowest = torch.finfo(logits.dtype).min
    highest = torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=lowest, posinf=highest, neginf=lowest)
