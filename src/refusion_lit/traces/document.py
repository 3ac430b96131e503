"""A trace of one decode, and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from refusion_lit.decoding import Generation
from refusion_lit.engine.output import TraceRound
from refusion_lit.utils.files import write_atomically
from refusion_lit.utils.require import require

FORMAT = "refusion-lit-trace"
"""Occurs in every file that holds a trace."""
_VERSION = 1
_MAX_POSITION = 10_000_000
_MAX_TOKEN_ID = 2**31
_MAX_SECONDS = 1e12
_MAX_PROBABILITY = 1.01  # a softmax in low precision can exceed 1
_TEXTS = ("decoder", "prompt", "response", "finish_reason")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One decode of one prompt.

    Attributes:
        decoder: Class name of the decoder.
        prompt: The query, before any template.
        response: The decoded text.
        prompt_length: Number of prompt tokens, template included; the response starts at this position.
        token_ids: Response tokens up to and including the end of sequence.
        slot_size: Tokens per slot; 1 for decoders without slots.
        finish_reason: See :class:`~refusion_lit.decoding.Generation`.
        seconds: Duration of the decode.
        rounds: One entry per forward.
        pieces: Text of each token id that occurs.
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
        """Number of forwards."""
        return len(self.rounds)

    @property
    def canvas_length(self) -> int:
        """Number of positions after the prompt that were drafted, accepted or returned."""
        touched = (p + 1 for r in self.rounds for p in (*r.positions, *r.accepted))
        return max(self.prompt_length + len(self.token_ids), *touched, self.prompt_length) - self.prompt_length

    def piece(self, token: int) -> str:
        """Return the text of a token id, or ``<id>`` if the trace has none."""
        return self.pieces.get(token, f"<{token}>")


def trace_of(
    generation: Generation,
    *,
    prompt: str,
    prompt_length: int,
    decoder: str,
    slot_size: int,
    piece: Callable[[int], str],
) -> Trace:
    """Build a trace of one prompt from the result of ``decode(..., trace=True)``.

    Args:
        generation: The prompt's generation.
        prompt: The query, before any template.
        prompt_length: Number of prompt tokens, template included.
        decoder: Class name of the decoder.
        slot_size: Tokens per slot; 1 for decoders without slots.
        piece: Returns the text of a token id.

    Raises:
        ValueError: If the decode recorded no trace.
    """
    if len(generation.trace) != generation.num_forwards:
        raise ValueError(
            f"trace: expected one entry for each of {generation.num_forwards} forwards, got {len(generation.trace)}; "
            "decode with trace=True."
        )
    ids = {token for entry in generation.trace for token in entry.tokens} | set(generation.token_ids)
    return Trace(
        decoder=decoder,
        prompt=prompt,
        response=generation.text,
        prompt_length=prompt_length,
        token_ids=tuple(generation.token_ids),
        slot_size=slot_size,
        finish_reason=generation.finish_reason,
        seconds=generation.seconds,
        rounds=tuple(generation.trace),
        pieces={token: piece(token) for token in sorted(ids)},
    )


def write_trace(trace: Trace, path: str | Path) -> None:
    """Save a trace as JSON, atomically."""
    write_atomically(path, json.dumps({"format": FORMAT, "version": _VERSION, **asdict(trace)}) + "\n")


def check_replaceable(path: Path, option: str) -> None:
    """Refuse to replace a file that holds no trace.

    Raises:
        ValueError: If there is such a file under this name.
    """
    is_free = not path.exists() or (path.is_file() and FORMAT.encode() in path.read_bytes())
    require(is_free, option, "a new file, or one with a trace", str(path), "choose another name")


def read_trace(path: str | Path) -> Trace:
    """Load and validate a trace saved with :func:`write_trace`.

    Raises:
        ValueError: If the file is missing or not a valid trace; the message names the first invalid entry.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"trace_file: expected a saved trace, got {path}, which is not a file; check the path.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # includes invalid UTF-8
        raise ValueError(f"trace_file: {path} is not JSON in UTF-8 ({error}); save it with --format json.") from error
    return _Parser(str(path)).trace(values)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _Parser:
    """Validates the values of one trace file; ``where`` is the path of a value inside the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, where: str, expected: str, got: object) -> NoReturn:
        shown = repr(got)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        raise ValueError(f"trace_file: {self.path}: {where}: expected {expected}, got {shown}; save the trace again.")

    def trace(self, values: object) -> Trace:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            self.fail("format", f"an object with format {FORMAT!r}", values)
        if values.get("version") != _VERSION:
            self.fail("version", str(_VERSION), values.get("version"))
        rounds = self.list(values.get("rounds"), "rounds")
        prompt_length = self.integer(values.get("prompt_length"), "prompt_length", 0, _MAX_POSITION)
        return Trace(
            **{name: self.text(values.get(name), name) for name in _TEXTS},
            prompt_length=prompt_length,
            token_ids=tuple(self.integers(values.get("token_ids"), "token_ids", 0, _MAX_TOKEN_ID)),
            slot_size=self.integer(values.get("slot_size"), "slot_size", 1, _MAX_POSITION),
            seconds=self.number(values.get("seconds"), "seconds", _MAX_SECONDS),
            rounds=tuple(self.round(entry, f"rounds[{i}]", prompt_length) for i, entry in enumerate(rounds)),
            pieces=self.pieces(values.get("pieces")),
        )

    def round(self, entry: object, where: str, prompt_length: int) -> TraceRound:
        if not isinstance(entry, dict):
            self.fail(where, "an object", entry)
        shape = self.integers(entry.get("shape"), f"{where}.shape", 1, _MAX_POSITION)
        if len(shape) != 2:
            self.fail(f"{where}.shape", "rows and length", shape)
        positions = self.integers(entry.get("positions"), f"{where}.positions", prompt_length, _MAX_POSITION)
        tokens = self.integers(entry.get("tokens"), f"{where}.tokens", 0, _MAX_TOKEN_ID)
        probabilities = self.probabilities(entry.get("probabilities"), f"{where}.probabilities")
        lengths = (len(positions), len(tokens), len(probabilities))
        if len(set(lengths)) > 1:
            self.fail(where, "equal numbers of positions, tokens and probabilities", lengths)
        accepted = self.integers(entry.get("accepted"), f"{where}.accepted", prompt_length, _MAX_POSITION)
        if len(set(accepted)) < len(accepted):
            self.fail(f"{where}.accepted", "each position once", accepted)
        return TraceRound(
            phase=self.text(entry.get("phase"), f"{where}.phase"),
            shape=(shape[0], shape[1]),
            positions=positions,
            tokens=tokens,
            probabilities=probabilities,
            scores=self.probabilities(entry.get("scores"), f"{where}.scores"),
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

    def list(self, values: object, where: str) -> list[object]:
        return values if isinstance(values, list) else self.fail(where, "a list", values)

    def integer(self, value: object, where: str, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.fail(where, f"an integer from {minimum} to {maximum}", value)
        return value

    def number(self, value: object, where: str, maximum: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= maximum:
            self.fail(where, f"a number from 0 to {maximum:g}", value)
        return float(value)

    def integers(self, values: object, where: str, minimum: int, maximum: int) -> list[int]:
        entries = enumerate(self.list(values, where))
        return [self.integer(value, f"{where}[{i}]", minimum, maximum) for i, value in entries]

    def probabilities(self, values: object, where: str) -> list[float]:
        entries = enumerate(self.list(values, where))
        return [self.number(value, f"{where}[{i}]", _MAX_PROBABILITY) for i, value in entries]
