"""The examples in docstrings of the package run and print what they show."""

from __future__ import annotations

import doctest
import importlib
import re
import warnings
from pathlib import Path

import pytest

import refusion_lit

ROOT = Path(__file__).parents[2]
PACKAGE = Path(refusion_lit.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # examples load the models of tests/goldens
    module = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed


def test_the_site_shows_every_role_as_code() -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install --group docs")
    hook = importlib.import_module("docs.site_pages")
    docstrings = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    html = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"<code>\1</code>", docstrings)
    assert re.search(r":\w+:<code>", html)
    assert re.findall(r":[\w:]+:<code>.*", hook.on_page_content(html)) == []
