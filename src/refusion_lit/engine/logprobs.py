"""Log-probabilities of a response's tokens, taken from the decode's forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from refusion_lit.engine.decoder import RowState
    from refusion_lit.engine.requests import Branch, Reading


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A response token's log-probability.

    Attributes:
        token_id: The token.
        logprob: The log-probability in nats: the log-softmax of the model's logits over the whole vocabulary, before
            temperature and filters. The logits come from the last forward pass that read the place before the token was
            final.
        forward: The forward pass's number within the prompt's decode, from 1.
        top: The place's most probable tokens with their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    forward: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class LogprobRecorder:
    """Keeps the last distributions read at every place, and the final tokens' log-probabilities.

    A forward pass may read a place twice: the model verifies a draft there, and a mask drafts in case an earlier draft
    is rejected. The final token's distribution is the first from which the token was taken.

    Attributes:
        num_top: Number of most probable tokens to record per place, at least 0.
        entries: The log-probabilities of final tokens by place in the response.
    """

    num_top: int
    entries: dict[int, TokenLogprob] = field(default_factory=dict)
    _read: dict[int, list[tuple[int, int, Tensor]]] = field(default_factory=dict)

    def record(self, state: RowState, branches: Sequence[Branch], readings: Sequence[Reading], forward: int) -> None:
        """Take a forward pass's readings, after the decoder has committed tokens.

        Args:
            state: The prompt's state.
            branches: The branches that were read.
            readings: Their readings, with log-probabilities.
            forward: Number of the forward pass.
        """
        for branch, reading in zip(branches, readings, strict=True):
            if reading.logprobs is None:
                continue
            positions = [branch.positions[offset] + branch.shift for offset in branch.draft_at]
            positions += [branch.positions[offset] + 1 for offset, _ in branch.score_at]
            tokens = [*reading.tokens, *(token for _, token in branch.score_at)]
            for position, token, row in zip(positions, tokens, reading.logprobs.unbind(), strict=True):
                read = self._read.setdefault(position - state.prompt_length, [])
                if read and read[0][0] != forward:  # an earlier forward pass
                    read.clear()
                read.append((forward, token, row))
        final = [
            place
            for place in self._read
            if 0 <= place < len(state.tokens)
            and not state.is_masked[place]
            and (place not in self.entries or self.entries[place].token_id != state.tokens[place])
        ]
        if not final:
            return
        tokens = [state.tokens[place] for place in final]
        chosen = [
            next((entry for entry in self._read[place] if entry[1] == token), self._read[place][0])
            for place, token in zip(final, tokens, strict=True)
        ]
        rows = torch.stack([row for _, _, row in chosen])
        logprobs = rows.gather(-1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
        best = rows.topk(min(self.num_top, rows.shape[-1]))
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for place, token, (number, _, _), logprob, (ids, values) in zip(
            final, tokens, chosen, logprobs, tops, strict=True
        ):
            self.entries[place] = TokenLogprob(token, logprob, number, tuple(zip(ids, values, strict=True)))
            del self._read[place]

    def of_response(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """Return the log-probabilities of a response's tokens; ``None`` for tokens that no forward pass has read."""
        entries = [self.entries.get(place) for place in range(len(tokens))]
        return [
            entry if entry is not None and entry.token_id == token else None
            for entry, token in zip(entries, tokens, strict=True)
        ]
