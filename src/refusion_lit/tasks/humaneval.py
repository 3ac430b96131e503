"""HumanEval: Python functions to complete from their docstrings (Chen et al., arXiv 2107.03374)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from refusion_lit.tasks.base import Split
from refusion_lit.tasks.code import CodeTask, extract_code
from refusion_lit.tasks.protocol import Protocol, read_protocol
from refusion_lit.tasks.readers import Row, text_field
from refusion_lit.types import Example
from refusion_lit.utils.require import require

# Start of a top-level statement: a model that continues the function's body has finished it here.
_END_OF_BODY = re.compile(r"\n(?=class\s|def\s|async def\s|@|#|if\s|print\b|assert\s|```|<\|)")


@dataclass(frozen=True, kw_only=True)
class HumanEval(CodeTask):
    """164 functions to complete, all in the test split, from the published files or ``openai/openai_humaneval``.

    A response is either the body that continues the prompt or the whole function, fenced or not. A whole function is
    run after the prompt, so that it can use the prompt's imports and helpers.

    Attributes:
        template: The query, where ``{prompt}`` stands for the problem's prompt.
    """

    template: str = "{prompt}"

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = "{prompt}" in self.template
        require(holds, "task.template", "a text with {prompt} in it", self.template, "add {prompt}")
        _ = self._protocol  # a wrong file is refused at once

    @property
    def _protocol(self) -> Protocol:
        return read_protocol(self.protocol, ("prompt", "entry_point"))

    def read(self, row: Row) -> tuple[Split, Example]:
        """Convert a row of the published format."""
        names = ("prompt", "canonical_solution", "test", "entry_point", "task_id")
        prompt, solution, test, entry_point, identity = [text_field(row, name) for name in names]
        meta = {"prompt": prompt, "test": test, "entry_point": entry_point}
        query = self._protocol.query(self.template, {"prompt": prompt, "entry_point": entry_point})
        return "test", Example(id=identity, query=query, response=solution, meta=meta)

    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return the prompt with the response, and the problem's check."""
        prompt, name = example.meta["prompt"], example.meta["entry_point"]
        code = extract_code(self._protocol.answer_in(response))
        if re.search(rf"^(async )?def {re.escape(name)}\b", code, re.MULTILINE):
            program = f"{prompt}\n{code}\n"  # the prompt alone is valid: a function with only a docstring
        else:
            program = prompt + _END_OF_BODY.split(code, maxsplit=1)[0] + "\n"
        return program, f"{example.meta['test']}\ncheck({name})\n"
