"""Reads chat turns from rows of data files. Several programs' formats become turns with role and content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from refusion_lit.tasks.base import MORE_THAN_TEXT
from refusion_lit.utils.require import require
from refusion_lit.utils.rows import DataRow

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "developer": "developer", "tool": "tool",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip
"""Roles of chat turns by their names in ShareGPT's format."""
TRAINING_MARKS = ("weight", "train", "training", "loss")
"""Fields in which other programs mark assistant turns: OpenAI and Mistral (``weight``), axolotl, and ms-swift."""
_SYSTEM = ("system", "system_prompt")
"""Fields of a row that may hold the system turn's text."""


def read_turns(row: DataRow, name: str, *, begins: bool = True) -> list[dict[str, Any]]:
    """Return the chat turns in a field, with ``role`` and ``content``.

    Args:
        row: The row.
        name: The field.
        begins: Whether the chat begins with these turns. If so, the row's system text comes first.

    Raises:
        ValueError: If a turn has a wrong form; the message names row and turn.
    """
    values = row.require_values()
    turns: Any = _parse_list(values.get(name))
    if not isinstance(turns, list | tuple) or not turns:
        names = ", ".join(map(repr, values))
        raise ValueError(
            f"{row.location}: expected a list of turns with role and content in field {name!r}, got {turns!r:.80} (the "
            f"row has {names}); set data.task.query_field to the field of the turns, or data.task.preset to auto, "
            "which goes by the names of the fields."
        )
    turns = [_rename(turn, f"{row.location}: turn {number} of {name!r}") for number, turn in enumerate(turns, start=1)]
    for number, turn in enumerate(turns, start=1):
        if not _is_turn(turn):
            role = f" ({turn['role']})" if isinstance(turn, dict) and isinstance(turn.get("role"), str) else ""
            raise ValueError(
                f"{row.location}: expected role and text content in turn {number}{role} of {name!r}, got {turn!r:.80}; "
                "correct the field (content may be a list of text parts, or null beside tool_calls), or set "
                "data.task.malformed: skip."
            )
    system = _read_system(row)
    if begins and system:
        first = turns[0]
        if first["role"] not in ("system", "developer"):
            return [{"role": "system", "content": system}, *turns]
        fix = "remove the field or the turn"
        is_same = first["content"] == system
        require(is_same, row.location, f"one system text, as turn 1 ({first['role']}) of {name!r}", system, fix)
    return turns


def read_earlier_turns(row: DataRow, query: str, *, has_history: bool) -> tuple[dict[str, Any], ...]:
    """Return the turns before a row's answer: its system text and, in Alpaca's format, its ``history``."""
    system = _read_system(row)
    history = row.require_values().get("history") if has_history else None
    if not system and not history:
        return ()
    are_pairs = isinstance(history or [], list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history or []
    )
    require(are_pairs, f"{row.location}: history", "pairs of a query and a response", history, "correct or remove it")
    turns = [{"role": "system", "content": system}] if system else []
    for before, answer in history or []:
        turns += [{"role": "user", "content": before}, {"role": "assistant", "content": answer}]
    return (*turns, {"role": "user", "content": query})


def read_tools(row: DataRow) -> list[Any]:
    """Return a row's tool descriptions, from ``tools`` or OpenAI's older ``functions``. They may be JSON text.

    Raises:
        ValueError: If the descriptions are no list of mappings, or the row sets options of the chat template.
    """
    values = row.require_values()
    fix = "set data.chat_template_kwargs for all rows, and remove the field"
    options = values.get("chat_template_kwargs")
    require(not options, f"{row.location}: chat_template_kwargs", "no options of the template in a row", options, fix)
    name = "tools" if values.get("tools") else "functions"
    given = values.get(name)
    if not given:
        return []
    tools = _parse_list(given)
    are_tools = isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
    require(are_tools, f"{row.location}: {name}", "a list of mappings, or its JSON text", given, "correct it")
    return [*tools] if name == "tools" else [{"type": "function", "function": function} for function in tools]


def _parse_list(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON text of a list, as columns of tables have it; return any other value unchanged."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return parsed if isinstance(parsed, list) else value


def is_context(turn: Mapping[str, Any]) -> bool:
    """Return whether an assistant's turn is marked as context, which is not trained."""
    return any(turn.get(mark) is not None and not turn[mark] for mark in TRAINING_MARKS)


def has_parts(turn: Mapping[str, Any]) -> bool:
    """Return whether an assistant's turn has text or other parts to train."""
    return bool((turn.get("content") or "").strip()) or any(turn.get(part) for part in MORE_THAN_TEXT)


def _read_system(row: DataRow) -> str:
    """Return a row's system text; empty without a system text."""
    return next((row.text(name) for name in _SYSTEM if row.require_values().get(name)), "")


def _rename(turn: object, where: str) -> Any:  # noqa: ANN401 - any JSON value
    """Rename the fields ``from`` and ``value`` of a ShareGPT turn to ``role`` and ``content``."""
    if not isinstance(turn, dict):
        return turn
    turn = {key: value for key, value in turn.items() if value is not None or key == "content"}  # columns of Parquet
    for name in ("content", "value"):
        if name in turn:
            turn[name] = _join_texts(turn[name])
    calls = turn.get("tool_calls")
    if isinstance(calls, list):
        turn["tool_calls"] = [*map(_parse_arguments, calls)]
    if "from" not in turn or "role" in turn:
        return turn
    role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
    known = ", ".join(_SHAREGPT_ROLES)
    require(role is not None, where, f"one of {known} in 'from'", turn["from"], "rename it, or remove the row")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if str(turn["from"]).lower() == "function_call":
        return {"role": role, "content": None, "tool_calls": _read_calls(turn.get("value"), where), **others}
    return {"role": role, "content": turn.get("value"), **others}


def _read_calls(text: object, where: str) -> list[dict[str, Any]]:
    """Parse the text of a ShareGPT turn ``function_call``, which is JSON for a call or a list of calls."""
    try:
        calls: Any = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    are_calls = isinstance(calls, list) and all(isinstance(call, dict) and "name" in call for call in calls)
    expected = "the JSON text of calls with name and arguments in the turn 'function_call'"
    require(bool(calls) and are_calls, where, expected, text, "correct it, or remove the row")
    return [_parse_arguments({"type": "function", "function": call}) for call in calls]


def _join_texts(content: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Join the text parts of a turn's content to one text; return any other content unchanged."""
    if not isinstance(content, list | tuple) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    are_texts = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if are_texts else content


def _parse_arguments(call: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Parse a call's arguments if they are JSON text, because templates would quote the text a second time."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _is_turn(turn: object) -> bool:
    """Return whether a value is a chat turn: it has a role, and content or tool calls."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    return isinstance(turn.get("content"), str) or (turn.get("content") is None and bool(turn.get("tool_calls")))
