"""Messages for users say what to do: none ends with advice that leaves the reader where they were."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import refusion_lit

PACKAGE = Path(refusion_lit.__file__).parent
EMPTY = re.compile(
    r"[;.] (change (it|them|some|its options)|correct it|check it|fix it|mend it|try again|"
    r"use another( one| checkpoint| model)?)\.?$",
    re.I,
)


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the constant text of a message; values that are filled in become braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def _messages() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name.endswith("Error") and node.args:
                yield from ((f"{path.name}:{node.lineno}", text) for text in _texts(node.args[0]))
            if name == "require" and len(node.args) == 5:
                yield from ((f"{path.name}:{node.lineno}", f"; {text}") for text in _texts(node.args[4]))


def test_no_message_ends_with_advice_that_says_nothing() -> None:
    messages = dict(_messages())
    assert len(messages) > 200
    assert {place: text for place, text in messages.items() if EMPTY.search(text)} == {}


def test_install_hints_name_packages_and_no_extra_of_an_unpublished_one() -> None:
    hints = [text for _, text in _messages() if "needs the package" in text or "needs submitit" in text]
    assert len(hints) >= 5
    assert all(re.search(r"run pip install [a-z][\w -]*\.$", text) for text in hints)
