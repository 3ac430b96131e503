"""A trace of one decode, and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from refusion_lit.decoding import Generation
from refusion_lit.engine.output import TraceRound
from refusion_lit.utils.files import write_atomically
from refusion_lit.utils.require import is_number, require

FORMAT = "refusion-lit-trace"
"""Occurs in every file that holds a trace."""
_VERSION = 1


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
    try:
        return _trace(values)
    except ValueError as error:
        raise ValueError(f"trace_file: {path}: {error}; save the trace again.") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _Range(NamedTuple):
    """A kind of numbers: integers if the bounds are integers."""

    low: float
    high: float


_COUNT = _Range(1, 10_000_000)
_POSITION = _Range(0, 10_000_000)
_TOKEN = _Range(0, 2**31)
_PROBABILITY = _Range(0.0, 1.01)  # a softmax in low precision can exceed 1
_ROUND = {
    "phase": str,
    "shape": [_COUNT],
    "positions": [_POSITION],
    "tokens": [_TOKEN],
    "probabilities": [_PROBABILITY],
    "scores": [_PROBABILITY],
    "accepted": [_POSITION],
}
_TRACE = {
    "rounds": [_ROUND],
    "decoder": str,
    "prompt": str,
    "response": str,
    "prompt_length": _POSITION,
    "token_ids": [_TOKEN],
    "slot_size": _COUNT,
    "finish_reason": str,
    "seconds": _Range(0.0, 1e12),
}
"""The kinds of a file's values by name: text, numbers in a range, lists of one kind, objects."""


def _trace(values: Any) -> Trace:  # noqa: ANN401 - any JSON value
    """Return the trace of a file's values."""
    known = values.get("format") == FORMAT if isinstance(values, dict) else False
    _expect(known, "format", f"an object with format {FORMAT!r}", values)
    _expect(values.get("version") == _VERSION, "version", str(_VERSION), values.get("version"))
    _check(values, _TRACE, "")
    for number, entry in enumerate(values["rounds"]):
        _check_round(entry, f"rounds[{number}]", values["prompt_length"])
    _expect(isinstance(values.get("pieces"), dict), "pieces", "an object", values.get("pieces"))
    for key, text in values["pieces"].items():
        _expect(key.isascii() and key.isdigit() and len(key) <= 10, "pieces", "token ids as keys", key)
        _check(text, str, f"pieces[{key}]")
    fields = {name: values[name] for name in _TRACE}
    fields["token_ids"] = tuple(values["token_ids"])
    rounds = [{name: entry[name] for name in _ROUND} for entry in values["rounds"]]
    fields["rounds"] = tuple(TraceRound(**{**entry, "shape": tuple(entry["shape"])}) for entry in rounds)
    return Trace(**fields, pieces={int(key): text for key, text in values["pieces"].items()})


def _check(value: Any, kind: Any, where: str) -> None:  # noqa: ANN401 - any JSON value and its kind
    """Refuse a value of another kind; the error names it by its path inside the file."""
    if isinstance(kind, dict):
        _expect(isinstance(value, dict), where, "an object", value)
        for name, inner in kind.items():
            _check(value.get(name), inner, f"{where}.{name}".removeprefix("."))
    elif isinstance(kind, list):
        _expect(isinstance(value, list), where, "a list", value)
        for index, each in enumerate(value):
            _check(each, kind[0], f"{where}[{index}]")
    elif kind is str:
        _expect(isinstance(value, str), where, "text", value)
    else:
        is_integer = isinstance(kind.low, int)
        holds = is_number(value, int) or (not is_integer and is_number(value, float))
        expected = f"{'an integer' if is_integer else 'a number'} from {kind.low} to {kind.high}"
        _expect(holds and kind.low <= value <= kind.high, where, expected, value)


def _check_round(entry: Mapping[str, Any], where: str, prompt_length: int) -> None:
    """Refuse a forward whose values contradict one another."""
    _expect(len(entry["shape"]) == 2, f"{where}.shape", "rows and length", entry["shape"])
    lengths = tuple(len(entry[name]) for name in ("positions", "tokens", "probabilities"))
    _expect(len(set(lengths)) == 1, where, "equal numbers of positions, tokens and probabilities", lengths)
    for name in ("positions", "accepted"):
        _check(entry[name], [_Range(prompt_length, _POSITION.high)], f"{where}.{name}")
    accepted = entry["accepted"]
    _expect(len(set(accepted)) == len(accepted), f"{where}.accepted", "each position once", accepted)


def _expect(holds: bool, where: str, expected: str, got: object) -> None:
    if not holds:
        shown = repr(got)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        raise ValueError(f"{where}: expected {expected}, got {shown}")
