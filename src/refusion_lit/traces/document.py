"""Traces of decodes, their JSON files, and texts of tokens and phases for viewers.

A decoder names the phase of every forward; ``a+b`` is a forward with two phases.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from refusion_lit.decoding import Decoder, Generation
from refusion_lit.engine.output import TraceRound
from refusion_lit.text_model import TextModel
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.files import digest, read_object, write_atomically
from refusion_lit.utils.require import require

FORMAT = "refusion-lit-trace"
"""Format name in every file with a trace."""
_VERSION = 2

_SYMBOLS = {"\n": "↵", "\t": "→", "\x7f": "␡"}
# Control and format characters (which include text direction), lone surrogates, line and paragraph separators.
_REPLACED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_EXPLANATIONS = {
    "prefill": "reads the prompt and predicts the first token",
    "next_token": "predicts the next token from left to right",
    "plan": "drafts the first tokens of all masked slots, to choose the slots that are filled next",
    "verify": "scores the drafted tokens from left to right; certain tokens are accepted",
    "draft": "drafts the tokens after the accepted ones",
    "recompute": "recomputes the KV cache entries of the filled slots, which then see other filled slots",
    "infill_propose": "drafts the missing tokens of the chosen slots",
    "infill_verify": "scores the drafts inside the chosen slots from left to right; certain drafts stay",
    "infill_autoregressive": "predicts the next token of every chosen slot in parallel",
    "denoise": "predicts all open masked tokens; the most confident tokens are accepted",
    "encode": "adds the prompt or the finished canvas to the cache",
    "edit": "reads a block without masks again, and replaces tokens where the model is sure of another token",
    "refresh": "computes the whole text to renew the cache, and accepts the most confident tokens of the block",
    "store": "adds the finished block to the cache",
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The record of a prompt's decode.

    Attributes:
        decoder: The decoder's class name.
        prompt: The query, before any template.
        response: The decoded text.
        prompt_length: Number of prompt tokens, template included; the response starts at this position.
        token_ids: Response tokens up to and including the EOS token.
        slot_size: Tokens per slot; 1 for decoders without slots.
        finish_reason: See :class:`~refusion_lit.decoding.Generation`.
        seconds: Duration of the decode.
        rounds: One entry per forward.
        pieces: Text by token id, for all ids that occur.
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
    def phases(self) -> dict[str, int]:
        """Number of forwards by phase, in the order in which the phases first occur."""
        return Counter(entry.phase for entry in self.rounds)

    @property
    def canvas_length(self) -> int:
        """Number of positions after the prompt that were drafted, accepted or returned."""
        touched = (p + 1 for r in self.rounds for p in (*r.positions, *r.accepted))
        return max(self.prompt_length + len(self.token_ids), *touched, self.prompt_length) - self.prompt_length

    def piece(self, token: int | None) -> str:
        """Return a token id's text, ``<id>`` if the trace lacks the text, ``?`` for an unknown id."""
        return "?" if token is None else self.pieces.get(token, f"<{token}>")


def record_trace(
    model: TextModel,
    query: str,
    decoder: Decoder,
    sampling: SamplingParams,
    *,
    token_ids: Sequence[int] | None = None,
    prompt_id: str = "0",
    **options: Any,  # noqa: ANN401 - options of TextModel.decode
) -> tuple[Generation, Trace]:
    """Decode a query and record every forward.

    :func:`~refusion_lit.traces.display.page` shows the trace.

    Args:
        model: The model.
        query: The text, before any template.
        decoder: The decoder.
        sampling: Length limit, sampling options and stop strings.
        token_ids: The query's prompt tokens; ``None``: the model's ``encode`` makes them.
        prompt_id: Key for sampling noise.
        options: Other options for the model's ``decode``.

    Raises:
        ValueError: As for :meth:`~refusion_lit.text_model.TextModel.decode`.

    >>> import refusion_lit
    >>> from refusion_lit.decoding import ReFusion
    >>> from refusion_lit.types import SamplingParams
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> generation, trace = record_trace(model, "12+34,56+78>", ReFusion(), SamplingParams(max_new_tokens=32))
    >>> generation.text, dict(trace.phases)
    ('12+34=46;56+78=134;', {'plan': 1, 'verify+plan': 1, 'verify': 1})
    """
    ids = tuple(model.encode(query) if token_ids is None else token_ids)
    prompt = Prompt(token_ids=ids, id=prompt_id)
    [generation] = model.decode([prompt], decoder, sampling, trace=True, **options).rows
    token_set = {token for entry in generation.trace for token in entry.tokens} | set(generation.token_ids)
    return generation, Trace(
        decoder=type(decoder).__name__,
        prompt=query,
        response=generation.text,
        prompt_length=len(ids),
        token_ids=tuple(generation.token_ids),
        slot_size=getattr(decoder, "slot_size", None) or 1,
        finish_reason=generation.finish_reason,
        seconds=generation.seconds,
        rounds=tuple(generation.trace),
        pieces={token: model.token_text(token) for token in sorted(token_set)},
    )


def write_trace(trace: Trace, path: str | Path) -> None:
    """Save a trace as JSON, atomically, with a digest."""
    values = json.loads(json.dumps(asdict(trace)))  # with texts as keys, as they are read
    document = {"format": FORMAT, "version": _VERSION, "digest": digest(values), "trace": values}
    write_atomically(path, json.dumps(document) + "\n")


def read_trace(path: str | Path) -> Trace:
    """Load a trace saved with :func:`write_trace`.

    Raises:
        ValueError: If the file is missing, is no trace of this version, or was changed after it was written.
    """
    got = f"{path}, which is not a file"
    require(Path(path).is_file(), "trace_file", "a saved trace", got, "check the path")
    document = read_object(path)
    head = (document.get("format"), document.get("version"))
    fix = "write the trace again with --output NAME.json"
    require(head == (FORMAT, _VERSION), "trace_file", f"a {FORMAT} of version {_VERSION}", str(path), fix)
    is_whole = document.get("digest") == digest(document.get("trace"))
    require(is_whole, "trace_file", "a trace as it was written", f"{path}, which was changed", fix)
    values = document["trace"]
    values["token_ids"] = tuple(values["token_ids"])
    values["rounds"] = tuple(TraceRound(**{**entry, "shape": tuple(entry["shape"])}) for entry in values["rounds"])
    values["pieces"] = {int(token): text for token, text in values["pieces"].items()}
    return Trace(**values)


def show_controls(text: str) -> str:
    """Replace every control character by a visible character."""
    return "".join(map(_show_control, text))


def show_controls_in_lines(text: str) -> str:
    """Replace every control character except newlines by a visible character."""
    return "\n".join(map(show_controls, text.split("\n")))


def _show_control(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # the block "Control Pictures"
    replaced = unicodedata.category(character) in _REPLACED_CATEGORIES
    return "\N{REPLACEMENT CHARACTER}" if replaced else character


def explain_phase(phase: str) -> str:
    """Return a sentence about a phase's forwards; empty for an unknown phase."""
    parts = [_EXPLANATIONS.get(part, "") for part in phase.split("+")]
    return "; it also ".join(parts) if all(parts) else ""
