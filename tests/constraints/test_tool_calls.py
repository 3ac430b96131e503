"""Calls in responses: what is a call, what remains text, and that the sizes of pieces do not matter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.constraints.tool_calls import (
    FORMATS,
    CallPiece,
    CallReader,
    ThoughtPiece,
    find_tool_format,
)
from refusion_lit.modeling.chat_template import find_thought_tags
from support.tools import TEMPLATES

CALL = '{"name": "f", "arguments": {"a": "</tool_call>", "b": [1]}}'
READ: list[tuple[str, str, str, list[tuple[str, str]]]] = [  # format, response, its text, its calls
    ("hermes", f"Hi.\n<tool_call>\n{CALL}\n</tool_call>", "Hi.", [("f", '{"a": "</tool_call>", "b": [1]}')]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>', "",
     [("g", "{}"), ("f", "{}")]),
    ("hermes", 'A <tool_call> {"name": "h", "arguments": {}}</tool_call> b ',
     'A <tool_call> {"name": "h", "arguments": {}}</tool_call> b ', []),
    ("hermes", '<tool_call>{"name": "f", bad}</tool_call><tool_call>{"name": "f"}',
     '<tool_call>{"name": "f", bad}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
     '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ("hermes", 'a <tool_call>{"name": "f", "arg', 'a <tool_call>{"name": "f", "arg', []),
    ("hermes", 'a <tool_call>{"name": "f"}</tool_c', 'a <tool_call>{"name": "f"}</tool_c', []),
    ("hermes", "a <tool", "a <tool", []),
    ("hermes", " \n", " \n", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>\n\nDone', "\n\nDone",
     [("f", '{"x": 1}')]),
    ("llama", ' {"name": "f", "parameters": {"x": "1"}}; {"name": "g", "parameters": {}}', "",
     [("f", '{"x": "1"}'), ("g", "{}")]),
    ("llama", '{"name": "f", "parameters": {}} and', '{"name": "f", "parameters": {}} and', []),
    ("llama", 'Text {"name": "f", "parameters": {}}', 'Text {"name": "f", "parameters": {}}', []),
    ("llama", '{"answer": 1}', '{"answer": 1}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"q": [1]}}, {"name": "g", "arguments": {}}]', "",
     [("f", '{"q": [1]}'), ("g", "{}")]),
    ("mistral", "[TOOL_CALLS] hm", "[TOOL_CALLS] hm", []),
    ("mistral_args", 'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "ok", [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral_args", "[TOOL_CALLS]zz", "[TOOL_CALLS]zz", []),
]  # fmt: skip


def read(name: str, parts: list[str], *, is_constrained: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of a response that comes in parts."""
    reader = CallReader(FORMATS[name], ["f", "g"], is_constrained=is_constrained)
    pieces = [piece for part in parts for piece in reader.read(part)] + reader.read("", is_last=True)
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            call = calls.setdefault(piece.index, ["", ""])
            call[0] += piece.name or ""
            call[1] += piece.arguments
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, [(name, arguments) for name, arguments in calls.values()]


def split(text: str, cuts: set[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]


CUTS = st.sets(st.integers(0, 120), max_size=30)


@pytest.mark.parametrize(("name", "response", "text", "calls"), READ)
def test_calls_are_read_and_the_rest_remains_text(
    name: str, response: str, text: str, calls: list[tuple[str, str]]
) -> None:
    assert read(name, [response]) == (text, calls) == read(name, [*response])

    @settings(max_examples=20, deadline=None)
    @given(cuts=CUTS)
    def check(cuts: set[int]) -> None:
        assert read(name, split(response, {min(cut, len(response)) for cut in cuts})) == (text, calls)

    check()


CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "llama": '{"name": "f", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]f[ARGS]{}",
}
THOUGHT: list[tuple[str, bool, str, str, int]] = [
    # response with CALL in place of calls, whether the prompt opens thoughts, its thoughts, its text, number of calls
    ("<think>Is it CALL?</think>CALL", False, "Is it CALL?", "", 1),
    ("<think>\nCALL\n</think>\n\nNo.", False, "CALL", "No.", 0),
    ("CALL</think>\nCALL", True, "CALL", "", 1),
    ("\nHm, CALL\n\n", True, "Hm, CALL", "", 0),  # cut before the end of the thoughts
    ("<think>CALL", False, "CALL", "", 0),
    ("<think></think>\n\nCALL", False, "", "", 1),
    ("</think>CALL", True, "", "", 1),
    ("<think>a</think> <think>b <think> CALL</think>CALL", False, "ab <think> CALL", "", 1),
    ("<think>a < b </thin k> </think> c < d <thi", False, "a < b </thin k>", "c < d <thi", 0),
    ("<think> \n", False, "", "", 0),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("response", "is_thinking", "thoughts", "text", "num_calls"), THOUGHT)
def test_calls_within_thoughts_are_thoughts(
    name: str, response: str, is_thinking: bool, thoughts: str, text: str, num_calls: int
) -> None:
    """Whether thoughts are kept in the text or returned apart, in one piece or in characters."""
    response, thoughts = response.replace("CALL", CALLS[name]), thoughts.replace("CALL", CALLS[name])

    def read(parts: list[str], **options: Any) -> tuple[list[Any], int]:
        reader = CallReader(FORMATS[name], ["f"], is_thinking=is_thinking, **options)
        pieces = [piece for part in parts for piece in reader.read(part)] + reader.read("", is_last=True)
        return pieces, reader.num_calls

    whole = response.removesuffix(CALLS[name]).rstrip() if num_calls else response
    for parts in ([response], [*response]):
        pieces, num = read(parts)
        assert ("".join(piece for piece in pieces if isinstance(piece, str)), num) == (whole, num_calls)
        pieces, num = read(parts, thoughts="separate")
        assert ("".join(piece for piece in pieces if isinstance(piece, str)), num) == (text, num_calls)
        parts_of_thoughts = [piece for piece in pieces if isinstance(piece, ThoughtPiece)]
        assert "".join(piece.text for piece in parts_of_thoughts) == thoughts
        if not num_calls:
            assert "".join(getattr(piece, "source", piece) for piece in pieces) == response


def test_tags_within_a_call_are_arguments() -> None:
    response = '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>'
    assert read("hermes", [*response]) == ("", [("f", '{"a": "<think>"}')])
    assert read("llama", [*'{"name": "f", "parameters": {"a": "<think>"}}']) == ("", [("f", '{"a": "<think>"}')])


def test_tags_are_those_of_the_template() -> None:
    """Tags that the response's text does not show, because they are special tokens, can be left out."""
    tags = find_thought_tags({"default": "[THINK]{{ messages }}[/THINK]"})
    reader = CallReader(FORMATS["mistral"], ["f"], thought_tags=tags, thoughts="untagged")
    assert "".join(map(str, reader.read(f"[THINK]a{CALLS['mistral']}[/THINK]<think>", is_last=True))) == (
        f"a{CALLS['mistral']}<think>"
    )
    assert find_thought_tags(None) == ("<think>", "</think>")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("calls", [[("f", '{"a": 1, "b": "}]\\"x"}')], [("f", "{}"), ("g", '{"q": {"r": [1, 2]}}')]])
def test_what_a_format_writes_is_read_again(name: str, calls: list[tuple[str, str]]) -> None:
    layout = FORMATS[name]
    texts = [layout.before_name + f + layout.after_name + text + layout.after_arguments for f, text in calls]
    if layout.between is None:
        texts, calls = texts[:1], calls[:1]
    response = layout.begin + (layout.between or "").join(texts) + layout.end
    for is_constrained in (False, True):
        assert read(name, [*response], is_constrained=is_constrained) == ("", calls)
        assert read(name, [response], is_constrained=is_constrained) == ("", calls)


def test_the_format_is_that_of_the_template_or_the_given_one() -> None:
    assert {name: find_tool_format(template) for name, template in TEMPLATES.items()} == FORMATS
    assert find_tool_format(TEMPLATES["hermes"], "llama") == FORMATS["llama"]
    assert find_tool_format({"default": "{{ messages }}", "tool_use": TEMPLATES["llama"]}) == FORMATS["llama"]
    older = find_tool_format("{{ tools }}[TOOL_CALLS] [{{ calls }}]")
    assert older is not None
    assert older.begin == "[TOOL_CALLS] ["
    for unknown in (None, "{{ messages }}", "<tool_call>", "{{ tools }}<tool_call><function=f>"):
        assert find_tool_format(unknown) is None
    with pytest.raises(ValueError, match="tool_format"):
        find_tool_format(TEMPLATES["hermes"], "xml")
