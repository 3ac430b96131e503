"""Tool calls and thoughts in responses: formats in which models write them, and a reader for growing responses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from refusion_lit.modeling.chat_template import join_templates
from refusion_lit.utils.require import require_choice


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes calls.

    The text of calls is ``begin``, the calls with ``between`` in between, and ``end``. The text of a call is
    ``before_name``, the name, ``after_name``, the arguments as JSON, and ``after_arguments``.

    Attributes:
        marker: Text that begins calls within a response. If it is empty, a response with calls has no other text.
        closing: Text that ends a call which begins with the marker.
        begin: Text before the calls.
        between: Text between two calls; ``None`` if a response has one call at most.
        end: Text after the calls.
        before_name: Text before the name.
        after_name: Text between name and arguments.
        after_arguments: Text after the arguments.
    """

    marker: str = ""
    closing: str = ""
    begin: str = ""
    between: str | None = None
    end: str = ""
    before_name: str = '{"name": "'
    after_name: str = '", "arguments": '
    after_arguments: str = "}"


FORMATS = {
    "hermes": ToolFormat(
        marker="<tool_call>",
        closing="</tool_call>",
        begin="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
    ),
    "llama": ToolFormat(after_name='", "parameters": '),
    "mistral": ToolFormat(marker="[TOOL_CALLS]", begin="[TOOL_CALLS][", between=", ", end="]"),
    "mistral_args": ToolFormat(
        marker="[TOOL_CALLS]",
        begin="[TOOL_CALLS]",
        between="[TOOL_CALLS]",
        before_name="",
        after_name="[ARGS]",
        after_arguments="",
    ),
}
"""Formats by name: Hermes and Qwen, Llama 3, Mistral with a list of calls, and newer Mistral with ``[ARGS]``."""


def find_tool_format(chat_template: object, name: str = "auto") -> ToolFormat | None:
    """Return the format in which a chat template's model writes calls; ``None`` if the template has no known format.

    Args:
        chat_template: The template, or templates by name, as tokenizers have them.
        name: A key of ``FORMATS``; with ``auto``, the template's text decides.

    Raises:
        ValueError: If the name is unknown.

    >>> find_tool_format("{{ tools }}<tool_call>{{ call | tojson }}</tool_call>").closing
    '</tool_call>'
    """
    require_choice("tool_format", name, ["auto", *FORMATS])
    text = join_templates(chat_template)
    if not re.search(r"\btools\b", text):
        return None  # the model would not see the tools
    if name == "auto" and "[TOOL_CALLS]" in text:
        name = "mistral_args" if "[ARGS]" in text else "mistral"
    elif name == "auto" and "<tool_call>" in text and not re.search("<function=|<arg_key>", text):
        name = "hermes"
    elif name == "auto" and re.search(r'"name\\?": ', text) and re.search(r'"parameters\\?": ', text):
        name = "llama"
    if name == "mistral" and "[TOOL_CALLS] [" in text:  # older templates
        return replace(FORMATS[name], begin="[TOOL_CALLS] [")
    return FORMATS.get(name)


@dataclass(frozen=True)
class ThoughtPiece:
    """A part of the thoughts.

    Attributes:
        text: The thoughts without tags and without white space around them; empty for a tag.
        source: The text as the model wrote it.
    """

    text: str
    source: str


@dataclass(frozen=True)
class CallPiece:
    """A part of a call.

    Attributes:
        index: The call's number in the response.
        name: The function's name in a call's first piece, ``None`` in further pieces.
        arguments: A part of the arguments' JSON text.
    """

    index: int
    name: str | None
    arguments: str


Piece: TypeAlias = str | ThoughtPiece | CallPiece
"""A part of a response: text, thoughts, or a call."""


class CallReader:
    """Splits a growing response into text, thoughts and calls.

    Thoughts contain no calls. Invalid calls remain text: JSON that does not parse, an unknown name, arguments that are
    no object. White space before and after calls is dropped, other text is not. Thoughts without a closing tag last
    until the response ends.

    Args:
        tool_format: How the model writes calls; ``None``: the response has no calls.
        names: The functions' names.
        is_constrained: Whether a grammar forces calls. The reader then returns arguments piece by piece; otherwise, it
            returns whole calls, because an incomplete call may turn out to be text. Forced calls have no thoughts.
        thought_tags: The tags around thoughts.
        is_thinking: Whether the response begins within thoughts, because the prompt ends with the opening tag.
        thoughts: ``text`` keeps thoughts in the text, as the model wrote them; ``untagged`` keeps them without tags;
            ``separate`` returns them as :class:`ThoughtPiece`, and drops white space after them.

    Attributes:
        num_calls: Number of calls so far.
        thought_spans: Separated thoughts in the response: the first character, and the character after the last.

    >>> reader = CallReader(FORMATS["hermes"], ["add"])
    >>> for text in ("Sum: <tool", '_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', " <tool_call> none"):
    ...     reader.read(text)
    ['Sum:']
    [CallPiece(index=0, name='add', arguments='{"a": 1}')]
    [' <tool_call>', ' none']
    >>> CallReader(None, [], thoughts="separate").read("<think>1 + 1")
    [ThoughtPiece(text='', source='<think>'), ThoughtPiece(text='1 + 1', source='1 + 1')]
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        names: Iterable[str],
        *,
        is_constrained: bool = False,
        thought_tags: tuple[str, str] = ("<think>", "</think>"),
        is_thinking: bool = False,
        thoughts: Literal["text", "untagged", "separate"] = "text",
    ) -> None:
        self._format = tool_format or ToolFormat()
        self._has_calls = tool_format is not None
        self._names = {*names}
        self._rest = ""
        self._has_text = False
        self._num_read = 0
        self.num_calls = 0
        self.thought_spans: list[tuple[int, int]] = []
        self._next = self._next_constrained if is_constrained else self._next_free
        self._arguments: str | None = None  # of the call that is being read
        self._tags = thought_tags
        self._is_thinking = is_thinking
        self._has_thoughts = False  # since the opening tag
        self._thoughts = thoughts
        is_separate = thoughts == "separate"
        self._end_of_thoughts = re.compile(rf"\s*{re.escape(thought_tags[1])}" + r"\s*" * is_separate)
        between = self._format.after_arguments + (self._format.between or self._format.end)
        opening = f"{_loosen(self._format.begin)}|{_loosen(between)}"
        name = "|".join(sorted(map(re.escape, self._names), key=len, reverse=True))
        before_name, after_name = map(_loosen, (self._format.before_name, self._format.after_name))
        self._head = re.compile(rf"\s*(?:{opening})\s*{before_name}({name}){after_name}")

    def read(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Return new pieces; hold back what may become a call or a tag unless ``is_last``."""
        self._rest += text
        self._num_read += len(text)
        pieces: list[Piece] = []
        start = self._num_read - len(self._rest)
        while (new := self._next(is_last)) is not None:
            pieces += new
            end = self._num_read - len(self._rest)
            if any(isinstance(piece, ThoughtPiece) for piece in new):
                self.thought_spans.append((start, end))
            start = end
        return pieces

    def _next_constrained(self, is_last: bool) -> list[Piece] | None:
        """Return the next pieces where a grammar forces calls; ``None`` if there are none yet."""
        if self._arguments is None:
            head = self._head.match(self._rest)
            if head is None:
                rest, self._rest = self._rest, "" if is_last else self._rest
                return [rest] if is_last and rest and not self.num_calls else None
            self._rest = self._rest[head.end() :]
            self._arguments = ""
            self.num_calls += 1
            return [CallPiece(self.num_calls - 1, head[1], "")]
        if not (self._rest if self._arguments else self._rest.strip()):
            return None
        before = self._arguments
        whole = (before + self._rest).lstrip()
        try:
            end = json.JSONDecoder().raw_decode(whole)[1]
        except ValueError:
            end, self._arguments = len(whole), whole
        else:
            self._arguments = None
        self._rest = whole[end:]
        return [CallPiece(self.num_calls - 1, None, whole[len(before) : end])]

    def _next_free(self, is_last: bool) -> list[Piece] | None:
        """Return the next text, thoughts or calls where no grammar forces calls; ``None`` if none is complete yet."""
        if self._is_thinking:
            return self._next_thoughts(is_last)
        start = self._find_start(is_last)
        thoughts = self._find(self._tags[0], is_last)
        text = self._rest[: min(start, thoughts)].rstrip()
        if thoughts < start and not text:
            end = thoughts + len(self._tags[0])
            if len(self._rest) < end:
                return None  # a part of the tag
            self._is_thinking, self._has_thoughts = True, False
            source, self._rest = self._rest[:end], self._rest[end:]
            return self._to_pieces("", source, self._tags[0])
        if not text and start == len(self._rest):
            if not is_last or not self._rest:
                return None
            text, self._rest = self._rest, ""
            return [] if self.num_calls else [text]  # only white space is left, which is dropped after calls
        if not text:
            try:
                result = self._parse(start, is_last)
            except (ValueError, RecursionError):  # no call: the marker is text, and calls may begin after it
                text = self._rest[: start + len(self._format.marker or "{")]
            else:
                if result is None:
                    return None
                calls, end = result
                self._rest = self._rest[end:]
                self.num_calls += len(calls)
                first = self.num_calls - len(calls)
                return [CallPiece(first + i, name, arguments) for i, (name, arguments) in enumerate(calls)]
        self._has_text = True
        self._rest = self._rest[len(text) :]
        return [text]

    def _next_thoughts(self, is_last: bool) -> list[Piece] | None:
        """Return the next thoughts, or their end; ``None`` if neither is complete yet."""
        source = self._rest[: self._find(self._tags[1], is_last)].rstrip()
        if source:
            self._rest = self._rest[len(source) :]
            text = source if self._has_thoughts else source.lstrip()
            self._has_thoughts = True
            return self._to_pieces(text, source)
        end = self._end_of_thoughts.match(self._rest)
        if end is not None and (is_last or self._thoughts != "separate" or end.end() < len(self._rest)):
            self._is_thinking = False
            self._rest = self._rest[end.end() :]
            return self._to_pieces("", end[0], self._tags[1])
        if is_last and self._rest:
            source, self._rest = self._rest, ""
            return self._to_pieces("", source)
        return None

    def _to_pieces(self, text: str, source: str, tag: str = "") -> list[Piece]:
        """Return thoughts as the response shows them."""
        if self._thoughts == "separate":
            return [ThoughtPiece(text, source)]
        return [source.replace(tag, "") if tag and self._thoughts == "untagged" else source]

    def _find_start(self, is_last: bool) -> int:
        """Return where calls may begin, or the text's length."""
        text = self._rest
        if self._format.marker:
            return self._find(self._format.marker, is_last)
        start = len(text) - len(text.lstrip())
        return start if self._has_calls and text[start : start + 1] == "{" and not self._has_text else len(text)

    def _find(self, tag: str, is_last: bool) -> int:
        """Return where a tag begins, else where a partial tag is held back at the end, else the text's length."""
        text = self._rest
        start = text.find(tag)
        if start >= 0:
            return start
        sizes = (n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n]))
        return len(text) - (0 if is_last else next(sizes, 0))

    def _parse(self, start: int, is_last: bool) -> tuple[list[tuple[str, str]], int] | None:
        """Return the calls that begin at ``start``, and the index behind them; ``None`` if they are not complete yet.

        Raises:
            ValueError: If there are no valid calls.
        """
        text, marker, closing = self._rest, self._format.marker, self._format.closing
        place = start + len(marker)
        if len(text) < place:
            return None  # a part of the marker
        try:
            values, end = self._decode(place)
        except json.JSONDecodeError as error:
            # The closing text may stand within a string of the arguments.
            closing_at = text.find(closing, place) if closing else -1
            has_ended = is_last or ("Unterminated" not in error.msg and error.pos <= closing_at)
            if has_ended or not re.match(r"\s*([\[{]|\Z)" if self._format.before_name else "", text[place:]):
                raise
            return None
        calls = [self._check(value) for value in values]
        rest = text[end:].lstrip()
        if rest.startswith(closing) and closing:
            return calls, len(text) - len(rest) + len(closing)
        if marker and not closing:
            return calls, end
        if (rest and (is_last or not closing)) or not closing.startswith(rest):
            raise ValueError("text follows the call")
        return (calls, len(text)) if is_last else None

    def _decode(self, place: int) -> tuple[list[Any], int]:
        """Return the JSON values for calls that begin at ``place``, and the index behind them."""
        decoder = json.JSONDecoder(parse_constant=_refuse_constant)
        values: list[Any] = []
        while True:
            place += len(self._rest[place:]) - len(self._rest[place:].lstrip())
            name = None
            if not self._format.before_name:
                name, _, _ = self._rest[place:].partition(self._format.after_name)
                place += len(name + self._format.after_name)
            value, place = decoder.raw_decode(self._rest, place)
            if name is not None:
                return [{"name": name.strip(), "arguments": value}], place
            values += value if isinstance(value, list) else [value]
            separator = re.match(r"\s*;", self._rest[place:])
            if separator is None:
                return values, place
            place += separator.end()

    def _check(self, value: Any) -> tuple[str, str]:  # noqa: ANN401 - any JSON value
        """Return a call's name, and its arguments as JSON text.

        Raises:
            ValueError: If the value does not call a known function with an object as arguments.
        """
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError("no call of a known function")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises an error for lone surrogates
        return name, text


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which Python's JSON reader accepts."""
    raise ValueError(f"{name} is not JSON")


def _loosen(text: str) -> str:
    """Return a regular expression for a text with any white space between words and around brackets."""
    return r"\s*".join(map(re.escape, re.findall(r"[{}\[\]]|[^\s{}\[\]]+", text)))
