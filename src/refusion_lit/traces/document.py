"""A trace with all that is needed to look at it, as a value and as a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from refusion_lit.decoding import Generation
from refusion_lit.decoding.output import TraceRound

_FORMAT = "refusion-lit-trace"
_VERSION = 1
_LARGEST_POSITION = 10_000_000
_LARGEST_ID = 2**31
_MOST_SECONDS = 1e12
_TEXTS = ("decoder", "prompt", "response", "finish_reason")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One decode of one prompt.

    Attributes:
        decoder: Name of the decoder's class.
        prompt: The query as it was given.
        response: The text of the response.
        prompt_length: Tokens of the prompt; the response begins at this position.
        token_ids: The response up to and including its end of sequence.
        slot_size: Tokens a slot; 1 for decoders without slots.
        finish_reason: As in :class:`~refusion_lit.decoding.Generation`.
        seconds: What the decode took.
        rounds: One entry a forward.
        pieces: The text of each token id that occurs.
    """

    decoder: str
    prompt: str
    response: str
    prompt_length: int
    token_ids: tuple[int, ...]
    slot_size: int
    finish_reason: str
    seconds: float
    rounds: tuple[TraceRound, ...]
    pieces: Mapping[int, str]

    @property
    def num_forwards(self) -> int:
        """Forwards of the decode."""
        return len(self.rounds)

    @property
    def canvas_length(self) -> int:
        """Places behind the prompt that the decode touched or returned."""
        touched = (p + 1 for r in self.rounds for p in (*r.positions, *r.accepted))
        return max(self.prompt_length + len(self.token_ids), *touched, self.prompt_length) - self.prompt_length

    def piece(self, token: int) -> str:
        """Return the text of a token; its number if it is not known."""
        return self.pieces.get(token, f"<{token}>")


def trace_of(
    row: Generation,
    *,
    prompt: str,
    response: str,
    prompt_length: int,
    decoder: str,
    slot_size: int,
    piece: Callable[[int], str],
) -> Trace:
    """Make a trace of what ``decode(..., trace=True)`` returned for a prompt.

    Args:
        row: The engine's output.
        prompt: The query's text.
        response: The response's text.
        prompt_length: Tokens of the prompt, template included.
        decoder: Name of the decoder's class.
        slot_size: Tokens a slot; 1 for decoders without slots.
        piece: Text of one token id.

    Raises:
        ValueError: If the decode recorded no trace.
    """
    if len(row.trace) != row.num_forwards:
        raise ValueError(
            f"trace: expected {row.num_forwards} entries, one a forward, got {len(row.trace)}; decode with trace=True."
        )
    ids = {token for entry in row.trace for token in entry.tokens} | set(row.token_ids)
    return Trace(
        decoder=decoder,
        prompt=prompt,
        response=response,
        prompt_length=prompt_length,
        token_ids=tuple(row.token_ids),
        slot_size=slot_size,
        finish_reason=row.finish_reason,
        seconds=row.seconds,
        rounds=tuple(row.trace),
        pieces={token: piece(token) for token in sorted(ids)},
    )


def write_trace(trace: Trace, path: str | Path) -> None:
    """Save a trace as JSON; a file that is there stays whole until the new one is."""
    values = {"format": _FORMAT, "version": _VERSION, **asdict(trace)}
    write_whole(path, json.dumps(values) + "\n")


def write_whole(path: str | Path, text: str) -> None:
    """Write a file beside its place, then move it there."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def read_trace(path: str | Path) -> Trace:
    """Read what :func:`write_trace` wrote, believing none of it.

    Raises:
        ValueError: If the file is missing or not a trace; names the first wrong entry.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"trace_file: expected a saved trace, got {path}, which is no file.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # a broken encoding is a ValueError too
        raise ValueError(f"trace_file: {path} is not JSON in UTF-8 ({error}); save it with --format json.") from error
    return _Reader(str(path)).trace(values)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


class _Reader:
    """Checks one file's values on their way in."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, where: str, expected: str, got: object) -> NoReturn:
        shown = repr(got)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        raise ValueError(f"trace_file: {self.path}: {where}: expected {expected}, got {shown}; save the trace again.")

    def trace(self, values: object) -> Trace:
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            self.fail("format", f"an object with format {_FORMAT!r}", values)
        if values.get("version") != _VERSION:
            self.fail("version", str(_VERSION), values.get("version"))
        rounds = values.get("rounds")
        if not isinstance(rounds, list):
            self.fail("rounds", "a list", rounds)
        prompt_length = self.integer(values.get("prompt_length"), "prompt_length", 0, _LARGEST_POSITION)
        return Trace(
            **{name: self.text(values.get(name), name) for name in _TEXTS},
            prompt_length=prompt_length,
            token_ids=tuple(self.integers(values.get("token_ids"), "token_ids", 0, _LARGEST_ID)),
            slot_size=self.integer(values.get("slot_size"), "slot_size", 1, _LARGEST_POSITION),
            seconds=self.number(values.get("seconds"), "seconds", _MOST_SECONDS),
            rounds=tuple(self.round(entry, f"rounds[{i}]", prompt_length) for i, entry in enumerate(rounds)),
            pieces=self.pieces(values.get("pieces")),
        )

    def round(self, entry: object, where: str, prompt_length: int) -> TraceRound:
        if not isinstance(entry, dict):
            self.fail(where, "an object", entry)
        shape = self.integers(entry.get("shape"), f"{where}.shape", 1, _LARGEST_POSITION)
        if len(shape) != 2:
            self.fail(f"{where}.shape", "rows and length", shape)
        positions = self.positions(entry.get("positions"), f"{where}.positions", prompt_length)
        tokens = self.integers(entry.get("tokens"), f"{where}.tokens", 0, _LARGEST_ID)
        probabilities = self.numbers(entry.get("probabilities"), f"{where}.probabilities")
        if not len(positions) == len(tokens) == len(probabilities):
            lengths = (len(positions), len(tokens), len(probabilities))
            self.fail(where, "as many positions as tokens and probabilities", lengths)
        accepted = self.positions(entry.get("accepted"), f"{where}.accepted", prompt_length)
        if len(set(accepted)) < len(accepted):
            self.fail(f"{where}.accepted", "each position once", accepted)
        return TraceRound(
            phase=self.text(entry.get("phase"), f"{where}.phase"),
            shape=(shape[0], shape[1]),
            positions=positions,
            tokens=tokens,
            probabilities=probabilities,
            scores=self.numbers(entry.get("scores"), f"{where}.scores"),
            accepted=accepted,
        )

    def pieces(self, values: object) -> dict[int, str]:
        if not isinstance(values, dict):
            self.fail("pieces", "an object", values)
        pieces = {}
        for key, text in values.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                self.fail("pieces", "token ids as keys", key)
            pieces[int(key)] = self.text(text, f"pieces[{key}]")
        return pieces

    def text(self, value: object, where: str) -> str:
        return value if isinstance(value, str) else self.fail(where, "text", value)

    def integer(self, value: object, where: str, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fail(where, f"an integer from {least} to {most}", value)
        return value

    def number(self, value: object, where: str, most: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            self.fail(where, f"a number from 0 to {most:g}", value)
        return float(value)

    def integers(self, values: object, where: str, least: int, most: int) -> list[int]:
        if not isinstance(values, list):
            self.fail(where, "a list", values)
        return [self.integer(value, f"{where}[{i}]", least, most) for i, value in enumerate(values)]

    def positions(self, values: object, where: str, prompt_length: int) -> list[int]:
        return self.integers(values, where, prompt_length, _LARGEST_POSITION)

    def numbers(self, values: object, where: str) -> list[float]:
        if not isinstance(values, list):
            self.fail(where, "a list", values)
        # Softmax in low precision may end a little above 1.
        return [self.number(value, f"{where}[{i}]", 1.01) for i, value in enumerate(values)]
