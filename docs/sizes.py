"""Print the size of every package and the words of its docstrings that send a reader back for a noun.

The last columns count words per 1 000 words of docstrings. Well-known packages have at most 5 *one*, 3 *each*, 0.5
*those* and 30 *of*.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

WORDS = ("one", "each", "those", "that", "of")


@dataclass
class Size:
    """What was counted in a group of files."""

    num_files: int = 0
    num_lines: int = 0
    num_code_lines: int = 0
    words: Counter[str] = field(default_factory=Counter)

    def add(self, text: str) -> None:
        """Count one file's text."""
        self.num_files += 1
        self.num_lines += text.count("\n")
        self.num_code_lines += len(code_lines(text))
        for docstring in docstrings(text):
            self.words.update(re.findall(r"[a-z']+", docstring.lower()))

    def row(self, name: str) -> str:
        """Return a row of the table."""
        total = max(self.words.total(), 1)
        shares = "".join(f"{1000 * self.words[word] / total:8.1f}" for word in WORDS)
        return f"{name:16}{self.num_files:6}{self.num_lines:8}{self.num_code_lines:8}{self.words.total():8}{shares}"


def docstrings(text: str) -> list[str]:
    """Return the docstrings of a module, including strings that follow an assignment."""
    rows = []
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                rows.append(value.value)
    return rows


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    previous = tokenize.NEWLINE
    for token in tokens:
        is_docstring = token.type == tokenize.STRING and previous in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        )
        if token.type not in layout and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.type
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("src/refusion_lit"), help="a Python package")
    root = parser.parse_args().folder
    sizes: dict[str, Size] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        text = path.read_text(encoding="utf-8")
        for name in (parts[0] if len(parts) > 1 else "(top)", "total"):
            sizes.setdefault(name, Size()).add(text)
    print(f"{'':16}{'files':>6}{'lines':>8}{'code':>8}{'words':>8}" + "".join(f"{word:>8}" for word in WORDS))
    total = sizes.pop("total", Size())
    for name, size in sorted(sizes.items()):
        print(size.row(name))
    print(total.row("total"))


if __name__ == "__main__":
    main()
