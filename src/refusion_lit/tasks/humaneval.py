"""HumanEval: functions from their docstrings (Chen et al., arXiv 2107.03374)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from refusion_lit.tasks.base import Split
from refusion_lit.tasks.code import CodeTask, code_of
from refusion_lit.tasks.readers import Row, text_field
from refusion_lit.types import Example

# Where a model that continues a function has begun something else.
_BEYOND = re.compile(r"\n(?=class\s|def\s|async def\s|@|#|if\s|print\b|assert\s|```|<\|)")


@dataclass(frozen=True, kw_only=True)
class HumanEval(CodeTask):
    """164 functions to complete, all in the test split; files as published, or ``openai/openai_humaneval``.

    A response may be the body that continues the prompt, or (fenced or not) the whole function. In the second case it
    follows the prompt, whose imports and helpers it may use.

    Attributes:
        template: How the prompt is asked; ``{prompt}`` stands for it.
    """

    template: str = "{prompt}"

    def __post_init__(self) -> None:
        """Check the template."""
        super().__post_init__()
        if "{prompt}" not in self.template:
            raise ValueError(f"task.template: expected a text with {{prompt}} in it, got {self.template!r}; add it.")

    def read(self, row: Row) -> tuple[Split, Example]:
        """Read a problem in the published format."""
        names = ("prompt", "canonical_solution", "test", "entry_point", "task_id")
        prompt, solution, test, entry_point, identity = [text_field(row, name) for name in names]
        meta = {"prompt": prompt, "test": test, "entry_point": entry_point}
        query = self.template.replace("{prompt}", prompt)
        return "test", Example(id=identity, query=query, response=solution, meta=meta)

    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return the prompt with the response, and the problem's check."""
        prompt, name = example.meta["prompt"], example.meta["entry_point"]
        code = code_of(response)
        if re.search(rf"^(async )?def {re.escape(name)}\b", code, re.MULTILINE):
            program = f"{prompt}\n{code}\n"  # the prompt by itself is a function with nothing but a docstring
        else:
            program = prompt + _BEYOND.split(code, maxsplit=1)[0] + "\n"
        return program, f"{example.meta['test']}\ncheck({name})\n"
