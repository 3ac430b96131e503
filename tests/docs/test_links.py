"""What the documentation names exists: files, folders, commands and nox sessions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from refusion_lit.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("experiments/*/README.md"),
        *ROOT.glob("experiments/*/details.md"),
    ]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"<!--.*?-->|https?://\S+", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\((?!#)([^)#\s]+)", text)
    paths = re.findall(r"\b((?:configs|experiments|tests|benchmarks|docs)/[\w./-]*\w)(?![\w*{])", text)
    for link in links:
        assert (page.parent / link).exists(), link
    for path in paths:
        assert any((folder / path).exists() for folder in (ROOT, page.parent, ROOT / "src" / "refusion_lit")), path


def test_commands_and_sessions_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"<!--.*?-->", "", "\n".join(page.read_text(encoding="utf-8") for page in PAGES), flags=re.DOTALL)
    main([])
    usage = "".join(capsys.readouterr())
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    commands = set(re.findall(r"\brefusion-lit ([a-z-]+)", code))
    assert len(commands) > 10
    assert commands <= set(re.findall(r"^  ([a-z-]+) ", usage, re.MULTILINE))
    sessions = set(re.findall(r"nox -s (\w+)", text))
    defined = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(sessions) > 5
    assert sessions <= defined
