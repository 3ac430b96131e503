"""MBPP: short functions from a sentence and three assertions (Austin et al., arXiv 2108.07732)."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.tasks.base import Split
from refusion_lit.tasks.code import CodeTask, code_of
from refusion_lit.tasks.readers import Row, text_field
from refusion_lit.types import Example


@dataclass(frozen=True, kw_only=True)
class Mbpp(CodeTask):
    """974 problems; test is task 11 to 510 as published, validation 511 to 600, train the rest.

    Files as published, or the hub data set ``google-research-datasets/mbpp``. Tasks 1 to 10, meant as examples in
    prompts, are in the training split.

    Attributes:
        template: How a problem is asked; ``{text}`` and ``{tests}`` stand for its sentence and assertions.
    """

    template: str = "{text}\nThe function has to pass these tests:\n{tests}\n"

    def __post_init__(self) -> None:
        """Check the template."""
        super().__post_init__()
        if "{text}" not in self.template:
            raise ValueError(f"task.template: expected a text with {{text}} in it, got {self.template!r}; add it.")

    def read(self, row: Row) -> tuple[Split, Example]:
        """Read a problem in the published format."""
        assert row.values is not None
        number, tests = row.values.get("task_id"), row.values.get("test_list")
        if not isinstance(number, int):
            raise ValueError(f"{row.where}: expected a whole number in field 'task_id', got {number!r}.")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError(f"{row.where}: expected a list of assertions in field 'test_list', got {tests!r:.80}.")
        text, code, setup = [_lines(text_field(row, name)) for name in ("text", "code", "test_setup_code")]
        query = self.template.replace("{text}", text).replace("{tests}", "\n".join(tests))
        split: Split = "test" if 11 <= number <= 510 else "validation" if 511 <= number <= 600 else "train"
        example = Example(id=f"MBPP/{number}", query=query, response=code, meta={"setup": setup, "tests": tests})
        return split, example

    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return the response's code, and the assertions behind what they need."""
        return code_of(response), "\n".join([example.meta["setup"], *example.meta["tests"], ""])


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")
