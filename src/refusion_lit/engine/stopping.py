"""Stop strings: finds the response's end, and streams text without showing a stop string's beginning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.requests import Steps
from refusion_lit.types import SamplingParams

_UNSETTLED = re.compile(r" (?:n ?'?|'[vr]?)?\Z")
"""Matches endings from which transformers' ``clean_up_tokenization`` may remove spaces when the next token comes."""


class StopFinder:
    """Finds the token at which a stop string ends a response.

    The finder looks at one token after the other, in text order. A response therefore ends at the same token, no matter
    which tokens a decoder commits together.

    Args:
        stop: The stop strings.
        detokenize: Turns tokens into text.

    Attributes:
        end: Number of response tokens that remain; ``None`` until a stop string appears.
    """

    end: int | None = None

    def __init__(self, stop: Sequence[str], detokenize: Callable[[list[int]], str]) -> None:
        self._stop = stop
        self._detokenize = detokenize
        self._num_seen = 0

    def watch(self, steps: Steps[None], state: RowState) -> Steps[None]:
        """Pass on a decoder's requests until a stop string ends the response."""
        readings: Any = None  # which starts a generator
        with suppress(StopIteration):
            while True:
                num_committed = state.num_committed
                request = steps.send(readings)
                if state.num_committed > num_committed and self.find(state.final_prefix()):
                    return
                readings = yield request

    def find(self, tokens: list[int]) -> bool:
        """Return whether a stop string ends a response, at :attr:`end`.

        Args:
            tokens: The response so far, which starts with the tokens of the last call.
        """
        for num_tokens in range(self._num_seen + 1, len(tokens) + 1):
            text = self._detokenize(tokens[:num_tokens])
            if any(string in text for string in self._stop):
                self.end = num_tokens
                break
        self._num_seen = len(tokens)
        return self.end is not None


class TextStream:
    """Turns a growing response into pieces of final text.

    The stream holds back text that may begin a stop string, incomplete characters, and spaces that a tokenizer may
    remove when the next token comes. Text that was sent cannot change: if the text changes, the stream goes on after
    the common prefix.

    >>> stream = TextStream(bytes.decode, SamplingParams(stop=["END"]))
    >>> [stream.piece(text) for text in (b"1 E", b"1 EN", b"1 EMU", b"1 EMU END 2")]
    ['1', '', ' EMU', '']

    Args:
        detokenize: Turns the tokens so far into text.
        sampling: Strings that end the response.
    """

    def __init__(self, detokenize: Callable[[list[int]], str], sampling: SamplingParams) -> None:
        self._detokenize = detokenize
        self._stop = sampling.stop
        self._sent = ""

    def piece(self, tokens: list[int]) -> str:
        """Return the text that is new in the final tokens so far."""
        text = cut_at_stop(self._detokenize(tokens), self._stop).rstrip("\N{REPLACEMENT CHARACTER}")
        text = _UNSETTLED.sub("", text)  # a stop string may begin before a space that is removed later
        starts = (stop[:n] for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)))
        held = [len(start) for start in starts if text.endswith(start)]
        stable = _UNSETTLED.sub("", text[: len(text) - max(held, default=0)])
        return self.rest(stable) if len(stable) > len(self._sent) else ""  # shorter where a request starts again

    def is_complete(self, tokens: list[int]) -> bool:
        """Return whether the whole text of the final tokens so far was sent."""
        return self._detokenize(tokens) == self._sent

    def rest(self, text: str) -> str:
        """Return the new part of the final text, and hold nothing back."""
        common = commonprefix([self._sent, text])  # noqa: RUF071 - no paths
        self._sent = text
        return text[len(common) :]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut a text before the first stop string in it.

    >>> cut_at_stop("42 END 43", ["END", "43"])
    '42 '
    """
    ends = [index for index in (text.find(string) for string in stop) if index >= 0]
    return text[: min(ends)] if ends else text
