"""Log-probabilities in OpenAI's form, and the bodies and events for ``/v1/responses``."""

from __future__ import annotations

import copy
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from refusion_lit.constraints.tool_calls import CallPiece, Piece, ThoughtPiece
from refusion_lit.decoding import TokenLogprob
from refusion_lit.serving.protocol import ResponsesRequest
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams

_KINDS: dict[type, str] = {str: "message", ThoughtPiece: "reasoning", CallPiece: "function_call"}
"""Item types in a response, by the class of their pieces."""


class ResponseBuilder:
    """Builds the body and the events of an answer to ``/v1/responses``.

    Args:
        body: The request.
        response_id: The response's id.
        sampling: The sampling options.
        model: Gives the tokens' text.

    Attributes:
        response: The response so far.
    """

    def __init__(self, body: ResponsesRequest, response_id: str, sampling: SamplingParams, model: TextModel) -> None:
        given = body.model_dump(mode="json", exclude_none=True, by_alias=True)
        self.response: dict[str, Any] = {
            "id": response_id, "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "error": None, "incomplete_details": None, "model": body.model, "instructions": body.instructions,
            "output": [], "max_output_tokens": sampling.max_new_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": sampling.seed, "tools": given["tools"],
            "tool_choice": given["tool_choice"] if body.tool_choice.name else body.tool_choice.type,
            "parallel_tool_calls": body.parallel_tool_calls, "previous_response_id": None, "store": False,
            "text": {"format": given["text"]["format"] if body.text.format.type == "json_schema"
                     else {"type": body.text.format.type}},
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "top_logprobs": body.top_logprobs, "truncation": "disabled", "metadata": body.metadata, "usage": None,
        }  # fmt: skip
        self._model = model
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not arrived yet
        self._num_bytes = 0  # of the text and thoughts so far
        self._num_covered = 0  # bytes of the tokens whose log-probabilities were taken
        self._num_events = 0
        self._item: dict[str, Any] | None = None  # the last item, unless it is complete

    def begin(self) -> list[dict[str, Any]]:
        """Return the events before the first item."""
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=copy.deepcopy(self.response)) for name in names]

    def add_logprobs(self, entries: LogprobEntries) -> None:
        """Add log-probabilities of tokens whose text follows; calls, and text after calls, have none."""
        if not any(item["type"] == "function_call" for item in self.response["output"]):
            self._logprobs += chat_logprobs(entries, self._model)["content"]

    def _take_logprobs(self, num_bytes: float = math.inf) -> list[dict[str, Any]]:
        """Return the log-probabilities, up to a byte of the text, that were not returned before."""
        taken: list[dict[str, Any]] = []
        while self._logprobs and self._num_covered < num_bytes:
            taken.append(self._logprobs.pop(0))
            content = taken[-1]["bytes"]
            self._num_covered += len(taken[-1]["token"].encode() if content is None else content)
        return taken

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece (text, thoughts or a call); return the events."""
        logprobs: list[dict[str, Any]] = []
        if not isinstance(piece, CallPiece):
            self._num_bytes += len((piece if isinstance(piece, str) else piece.source).encode())
            logprobs = self._take_logprobs(self._num_bytes)
        if isinstance(piece, ThoughtPiece) and not piece.text:
            return []
        kind = _KINDS[type(piece)]
        is_new = self._item is None or self._item["type"] != kind or (isinstance(piece, CallPiece) and piece.name)
        events = [*self._close(), *self._open(piece)] if is_new else []
        assert self._item is not None
        if isinstance(piece, str):
            events.append(self._add_text(piece, logprobs))
        elif isinstance(piece, ThoughtPiece):  # whose tokens have no log-probabilities
            self._item["content"][0]["text"] += piece.text
            events.append(self._item_event("reasoning_text.delta", content_index=0, delta=piece.text))
        else:
            self._logprobs.clear()
            self._item["arguments"] += piece.arguments
            if piece.arguments:
                events.append(self._item_event("function_call_arguments.delta", delta=piece.arguments))
        return events

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return self._item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def finish(self, finish_reason: str, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Complete the response; return the last events."""
        is_cut = finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = [] if self.response["output"] else self.add("")
        is_message = self._item is not None and self._item["type"] == "message"
        if is_message and (rest := self._take_logprobs()):
            events.append(self._add_text("", rest))
        events += self._close(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
                "total_tokens": usage["total_tokens"],
                "forwards": usage["forwards"],
                "tokens_per_forward": usage["tokens_per_forward"],
            },
        }
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, message: str) -> dict[str, Any]:
        """Return the event for a failed response."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=self.response)

    def _open(self, piece: Piece) -> list[dict[str, Any]]:
        """Begin an item with its first piece."""
        fields: dict[str, Any]
        part: dict[str, Any] | None = None
        if isinstance(piece, str):
            prefix, fields = "msg", {"role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif isinstance(piece, ThoughtPiece):
            prefix, fields = "rs", {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            prefix, fields = "fc", {"call_id": new_call_id(), "name": piece.name, "arguments": ""}
        head = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": _KINDS[type(piece)], "status": "in_progress"}
        self._item = head | fields
        self.response["output"].append(self._item)
        events = [self._item_event("output_item.added", item=copy.deepcopy(self._item))]
        if part is not None:
            self._item["content"].append(part)
            events.append(self._item_event("content_part.added", content_index=0, part=copy.deepcopy(part)))
        return events

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the last item."""
        if self._item is None:
            return []
        self._item["status"] = status
        if self._item["type"] != "function_call":
            [part] = self._item["content"]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [self._item_event(f"{part['type']}.done", content_index=0, **done),
                      self._item_event("content_part.done", content_index=0, part=part)]  # fmt: skip
        else:
            done = {"name": self._item["name"], "arguments": self._item["arguments"]}
            events = [self._item_event("function_call_arguments.done", **done)]
        events.append(self._item_event("output_item.done", item=self._item))
        self._item = None
        return events

    def _item_event(self, kind: str, /, **values: object) -> dict[str, Any]:
        assert self._item is not None
        names = {} if kind.startswith("output_item") else {"item_id": self._item["id"]}
        return self._event(f"response.{kind}", output_index=len(self.response["output"]) - 1, **names, **values)

    def _event(self, kind: str, /, **values: object) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **values}


def new_call_id() -> str:
    """Return a new call id: nine letters and digits, the only form that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]


LogprobEntries = Sequence[tuple[int, TokenLogprob | None]]
"""Tokens with their log-probabilities; ``None`` for tokens that a schema gives."""


def chat_logprobs(entries: LogprobEntries, model: TextModel) -> dict[str, Any]:
    """Return log-probabilities in the form of OpenAI's chats. ``forward`` numbers the forward pass that computed them.

    Args:
        entries: The tokens. The token that ends the response has no text and is left out.
        model: Gives the tokens' text.
    """

    def describe(token: int, logprob: float | None) -> dict[str, Any]:
        content = model.token_bytes(token)
        return {
            "token": model.token_text(token), "logprob": logprob, "bytes": None if content is None else [*content]
        }  # fmt: skip

    return {
        "content": [
            {
                **describe(token, entry and entry.logprob),
                "top_logprobs": [describe(*pair) for pair in (entry.top if entry else ())],
                "forward": entry and entry.forward,
            }
            for token, entry in _without_end(entries, model)
        ]
    }


def completion_logprobs(entries: LogprobEntries, model: TextModel, start: int) -> dict[str, Any]:
    """Return log-probabilities in the form of OpenAI's completions. ``forwards`` are the numbers of forward passes.

    Args:
        entries: The tokens. The token that ends the response has no text and is left out.
        model: Gives the tokens' text.
        start: Number of characters of the response before the tokens.
    """
    known = _without_end(entries, model)
    texts = [model.token_text(token) for token, _ in known]
    return {
        "tokens": texts,
        "token_logprobs": [entry and entry.logprob for _, entry in known],
        "top_logprobs": [
            entry and {model.token_text(token): logprob for token, logprob in entry.top} for _, entry in known
        ],
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=start)] if texts else [],
        "forwards": [entry and entry.forward for _, entry in known],
    }


def _without_end(entries: LogprobEntries, model: TextModel) -> LogprobEntries:
    """Return entries without the EOS token at the end."""
    ends = model.backbone.special_tokens.eos_token_ids
    return [*entries[:-1], *(entry for entry in entries[-1:] if entry[0] not in ends)]
