"""Early ends of a response, at a stop string or where it repeats itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.requests import Steps
from refusion_lit.types import SamplingParams


class Stopping:
    """Finds where stop strings or a low entropy end a response.

    It looks at one token after the other in text order, so a response ends at the same token whatever a decoder commits
    together.

    Args:
        sampling: Stop strings, entropy and its window.
        detokenize: Turns tokens into text; only needed for stop strings.

    Attributes:
        end: How many tokens remain of a response that ends; ``None`` until then.
    """

    end: int | None = None

    def __init__(self, sampling: SamplingParams, detokenize: Callable[[list[int]], str] | None) -> None:
        self._sampling = sampling
        self._detokenize = detokenize
        self._num_seen = 0

    def watched(self, steps: Steps[None], state: RowState) -> Steps[None]:
        """Pass on a decoder's requests until the response ends."""
        readings: Any = None  # which starts a generator
        with suppress(StopIteration):
            while True:
                num_committed = state.num_committed
                request = steps.send(readings)
                if state.num_committed > num_committed and self.ends(state.final_prefix()):
                    return
                readings = yield request

    def ends(self, tokens: list[int]) -> bool:
        """Return whether a response ends, at :attr:`end`.

        Args:
            tokens: The response so far, which starts with the tokens of the last call.
        """
        for num_tokens in range(self._num_seen + 1, len(tokens) + 1):
            if self._repeats(tokens[:num_tokens]):
                self.end = num_tokens - self._sampling.entropy_window
            elif self._sampling.stop and self._shows_stop(tokens[:num_tokens]):
                self.end = num_tokens
            if self.end is not None:
                break
        self._num_seen = len(tokens)
        return self.end is not None

    def _repeats(self, tokens: list[int]) -> bool:
        """Whether the counts of the last window of tokens have too low an entropy."""
        window = self._sampling.entropy_window
        if self._sampling.min_entropy is None or len(tokens) <= window:
            return False
        counts = Counter(tokens[-window:]).values()
        return math.log(window) - sum(count * math.log(count) for count in counts) / window < self._sampling.min_entropy

    def _shows_stop(self, tokens: list[int]) -> bool:
        assert self._detokenize is not None
        text = self._detokenize(tokens)
        return any(string in text for string in self._sampling.stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut a text before the first stop string in it."""
    ends = [index for index in (text.find(string) for string in stop) if index >= 0]
    return text[: min(ends)] if ends else text
