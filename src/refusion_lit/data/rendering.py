"""Renders conversations as text with a chat template or a prompt template.

Special tokens' names in text from users and data sets are marked, because only a template may write special tokens.
Tags of thoughts in the assistant's turns are an exception.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.added_tokens import read_added_tokens
from refusion_lit.modeling.chat_template import find_thought_tags, get_chat_options, join_templates
from refusion_lit.tasks.base import MORE_THAN_TEXT
from refusion_lit.utils.require import require

_PROBE = "probe of a turn"
_CALLS = ("tool_calls", "function_call")
_FIX_TEMPLATE = "correct chat_template in tokenizer_config.json, or chat_template.jinja, or change the turns"


def normalize_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return chat turns with texts as contents; a content's text parts are joined.

    Raises:
        ValueError: If a turn has no role, or a content part is no text: a template may render an image silently.
    """
    is_sequence = isinstance(messages, Iterable) and not isinstance(messages, str | Mapping)
    fix = "put a single turn in a list"
    require(is_sequence, "messages", "a list of turns, each a dict with role and content", messages, fix)
    turns: list[Mapping[str, Any]] = []
    for number, turn in enumerate(messages):
        is_turn = isinstance(turn, Mapping) and isinstance(turn.get("role"), str)
        require(is_turn, f"messages.{number}", "a dict with role and content", turn, "write {role: user, content: ...}")
        content = turn.get("content")
        if not isinstance(content, list | tuple):
            turns.append(turn)
            continue
        texts: list[str] = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else part
            is_text = isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str)
            option = f"messages.{number}.content.{index}.type"
            require(is_text, option, "'text', because models read text only", kind, "leave the part out")
            texts.append(part["text"])
        turns.append({**turn, "content": "".join(texts)})
    return turns


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    guard: NameGuard,
    turns: Sequence[Mapping[str, Any]],
    prompt_template: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_open: bool = True,
    chat_options: Mapping[str, Any] | None = None,
) -> str:
    """Return the rendered turns, with marks around special tokens' names in users' text.

    Args:
        tokenizer: The tokenizer.
        guard: Marks the names.
        turns: The turns.
        prompt_template: Text with ``{query}`` in it, for tokenizers without a chat template.
        tools: Tool descriptions for the chat template.
        is_open: Whether the text ends with the assistant's opening.
        chat_options: Chat template options besides the options that are stored with the tokenizer.

    Raises:
        ValueError: If the chat template refuses the turns, or there are several turns without a chat template.
    """
    roles = ", ".join(str(turn["role"]) for turn in turns)
    if not tokenizer.chat_template:
        expected = "one turn, as the tokenizer has no chat template"
        fix = "leave out the other turns, or use a tokenizer with a chat template"
        require(len(turns) == 1, "messages", expected, f"turns of {roles}", fix)
        fix = "leave them out, or use a tokenizer with a chat template"
        require(not tools, "tools", "none, as the tokenizer has no chat template", f"{len(tools)} tools", fix)
        return prompt_template.replace("{query}", guard.mark(str(turns[0].get("content") or "")))
    marked: Any = [_map_texts(partial(guard.mark, is_answer=turn["role"] == "assistant"), dict(turn)) for turn in turns]
    options: dict[str, Any] = {**get_chat_options(tokenizer), **(chat_options or {})}
    if tools:
        options["tools"] = _map_texts(guard.mark, list(tools))
    try:
        return _apply_template(tokenizer, marked, add_generation_prompt=is_open, **options)
    except Exception as error:  # a template may raise any error
        if type(error) is not TemplateError:  # the class of raise_exception
            option = "tokenizer" if isinstance(error, TemplateSyntaxError) else "messages"
            message = f"{option}: the chat template cannot render turns of {roles} ({error}); {_FIX_TEMPLATE}."
            raise ValueError(message) from error
        changeable = [name for name in chat_options or () if name != "continue_final_message"]
        fix = " or ".join(["reorder them", *(f"change {name}" for name in changeable)])
        message = f"messages: the chat template refuses turns of {roles} ({error}); {fix}."
        raise ValueError(message) from error


def _apply_template(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]], **options: Any) -> str:  # noqa: ANN401
    """Return the rendered turns.

    Most templates write calls' arguments as JSON themselves. Templates that refuse the arguments as values, such as
    DeepSeek's, get the JSON text.
    """
    apply: Any = tokenizer.apply_chat_template
    try:
        return str(apply(list(turns), tokenize=False, **options))
    except Exception:  # a template may raise any error
        written = [*map(_write_arguments, turns)]
        if written == [*turns]:
            raise
        with suppress(Exception):
            return str(apply(written, tokenize=False, **options))
        raise


def _write_arguments(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn whose calls have their arguments as JSON text."""

    def write(call: Any) -> Any:  # noqa: ANN401 - any JSON value
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    calls = turn.get("tool_calls")
    return {**turn, "tool_calls": [*map(write, calls)]} if isinstance(calls, list | tuple) else turn


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, is_open: bool = True
) -> list[tuple[str, bool]]:
    """Render chat turns with the chat template, in parts.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The turns.
        is_open: Whether the assistant's turn is opened; otherwise, the last turn is left open.

    Returns:
        Texts, with whether special tokens' names in a text mean the tokens, for
        :func:`~refusion_lit.data.encoding.encode_parts`.

    Raises:
        ValueError: If the chat template refuses the turns.
    """
    guard = NameGuard(tokenizer, list_texts(messages))
    options = {"continue_final_message": not is_open}
    return guard.split(render_turns(tokenizer, guard, messages, "", (), is_open=is_open, chat_options=options))


def check_turns(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    chat_options: Mapping[str, Any] | None,
    prompt: str,
) -> None:
    """Refuse turns, tools and calls that the chat template drops: many templates know no developer, some no tools.

    Args:
        tokenizer: The tokenizer.
        turns: The turns.
        tools: Tool descriptions.
        chat_options: Chat template options besides the options that are stored with the tokenizer.
        prompt: The rendered turns.

    Raises:
        ValueError: If a turn with another role than system, user and assistant, the last turn of the user, a call or
            the tools would not be in the prompt.
    """
    if not tokenizer.chat_template:
        return
    options: dict[str, Any] = {**get_chat_options(tokenizer), **(chat_options or {}), "tools": list(tools) or None}
    options["add_generation_prompt"] = True

    def render(turns: Sequence[Mapping[str, Any]], **others: object) -> str | None:
        """Return the rendered turns; ``None`` if the template refuses them, as it does not drop what it inspects."""
        try:
            return _apply_template(tokenizer, turns, **options | others)
        except Exception:  # a template may raise any error
            return None

    _check_roles(turns, prompt, render)
    if tools:
        rendered = render(turns)
        is_dropped = rendered is not None and rendered == render(turns, tools=None)
        fix = "use a template that renders them, or leave them out"
        require(not is_dropped, "tools", "a chat template that renders tools", f"{len(tools)} tools", fix)
    if any(turn.get(name) for turn in turns for name in _CALLS):
        _check_calls(turns, render)


def _check_roles(turns: Sequence[Mapping[str, Any]], prompt: str, render: Callable[..., str | None]) -> None:
    """Refuse a turn whose content may be changed without changing the prompt.

    Only turns of rare roles are tried, and the user's last turn if its content is not in the prompt.

    Args:
        turns: The turns.
        prompt: The rendered turns.
        render: Renders turns; returns ``None`` for turns that the template refuses.
    """
    query = turns[-1] if turns[-1]["role"] == "user" else {}
    is_query_shown = str(query.get("content") or "").strip() in prompt
    for number, turn in enumerate(turns):
        is_rare = turn["role"] not in ("system", "user", "assistant")
        if is_rare or (turn is query and not is_query_shown):
            changed = render([*turns[:number], {**turn, "content": _PROBE}, *turns[number + 1 :]])
            is_rendered = changed is None or changed != render(turns)
            expected = "a role that the chat template renders"
            fixes = {"developer": "use system", "user": _FIX_TEMPLATE}
            fix = fixes.get(turn["role"], "leave it out")
            require(is_rendered, f"messages.{number}.role", expected, turn["role"], fix)


def _check_calls(turns: Sequence[Mapping[str, Any]], render: Callable[..., str | None]) -> None:
    """Refuse a call that may be left out without changing the prompt.

    One rendering, with new names for the functions of all calls, is enough if all new names are in the prompt.

    Args:
        turns: The turns.
        render: Renders turns; returns ``None`` for turns that the template refuses.
    """
    probes: list[str] = []
    renamed = render([_rename_calls(turn, probes) for turn in turns])
    if renamed is not None and all(probe in renamed for probe in probes):
        return
    rendered = render(turns)
    if rendered is None:
        return
    for number, turn in enumerate(turns):
        for name, other in leave_out_parts(turn):
            is_dropped = name in _CALLS and render([*turns[:number], other, *turns[number + 1 :]]) == rendered
            expected = f"a chat template that renders the calls of turn {number + 1} ({turn['role']})"
            fix = "use a template that renders them, or leave the turn out"
            require(not is_dropped, f"messages.{number}.{name}", expected, turn.get(name), fix)


def _rename_calls(turn: Mapping[str, Any], probes: list[str]) -> Mapping[str, Any]:
    """Return a turn whose calls name a probe instead of their functions, and append the probes to a list."""

    def rename(call: Any) -> Any:  # noqa: ANN401 - any JSON value
        probes.append(f"{_PROBE} {len(probes)}.")
        if not isinstance(call, Mapping):
            return call
        function = call.get("function")
        if isinstance(function, Mapping):
            return {**call, "function": {**function, "name": probes[-1]}}
        return {**call, "name": probes[-1]}

    turn = {**turn}
    if isinstance(turn.get("tool_calls"), list | tuple):
        turn["tool_calls"] = [*map(rename, turn["tool_calls"])]
    if turn.get("function_call"):
        turn["function_call"] = rename(turn["function_call"])
    return turn


def get_parts(turn: Mapping[str, Any]) -> list[str]:
    """Return the names of an assistant turn's parts that are not empty, without its role."""
    return [name for name in ("content", *MORE_THAN_TEXT) if turn.get(name)]


def leave_out_parts(turn: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of every part in an assistant turn, and the turn without the part; a call is a part, too."""
    for name in get_parts(turn):
        others = {key: value for key, value in turn.items() if key != name}
        if name == "content":
            yield name, {**others, name: ""}
        elif name == "tool_calls" and len(turn[name]) > 1:
            for index in range(len(turn[name])):
                yield name, {**others, name: [*turn[name][:index], *turn[name][index + 1 :]]}
        else:
            yield name, {"content": "", **others}


def list_texts(value: object) -> Iterator[str]:
    """Yield the texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from list_texts([*value, *value.values()])
    elif isinstance(value, Iterable):
        for item in value:
            yield from list_texts(item)


def _map_texts(function: Callable[[str], str], value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return nested lists and mappings with a function applied to their texts."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map_texts(function, item) for name, item in value.items()}
    return [_map_texts(function, item) for item in value] if isinstance(value, list | tuple) else value


class NameGuard:
    """Marks special tokens' names in users' text, so that they differ from a template's names after rendering.

    Only names are marked, so that a template can trim and inspect the other text.

    Args:
        tokenizer: The tokenizer with the special tokens.
        texts: All texts to mark; the marks are characters that no text contains.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
        added = read_added_tokens(tokenizer)
        self._names, self._other_names = added.special_names, added.other_names
        tags = find_thought_tags(tokenizer.chat_template)
        self._tags = {*tags} if tags[1] in join_templates(tokenizer.chat_template) else set()
        used = set().union(*texts)
        # Unicode reserves code points from U+FDD0 on for internal use; texts rarely contain them.
        free = (mark for mark in map(chr, range(0xFDD0, sys.maxunicode)) if mark not in used)
        self._open = next(free)
        self._close = next(free)
        self.probe = next(free)
        """A character that no text contains."""

    def mark(self, text: str, *, is_answer: bool = False) -> str:
        """Mark special tokens' names in a text.

        Args:
            text: The text.
            is_answer: Whether the assistant wrote the text. Tags of thoughts that the chat template names then stay
                without marks: templates look for the tags, and models write them as tokens.
        """
        kept = self._tags if is_answer else ()
        return self._names.sub(lambda name: name[0] if name[0] in kept else self._open + name[0] + self._close, text)

    def find_names(self, rendered: str, start: int = 0) -> list[tuple[int, int]]:
        """Return start and end of the names that mean special tokens; without any, of other added tokens' names.

        Args:
            rendered: The rendered turns, or a part of them.
            start: Where to begin.
        """
        special = [
            name.span() for name in self._names.finditer(rendered, start) if rendered[name.start() - 1] != self._open
        ]
        return special or [name.span() for name in self._other_names.finditer(rendered, start)]

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Split at the marks; return the texts, with whether names in a text mean special tokens."""
        parts = re.split(f"{self._open}([^{self._open}{self._close}]*){self._close}", rendered)
        # A template that truncates a name leaves an unpaired mark.
        unpaired = str.maketrans("", "", self._open + self._close)
        return [(part.translate(unpaired), i % 2 == 0) for i, part in enumerate(parts) if part]
