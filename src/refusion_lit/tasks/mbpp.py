"""MBPP: short Python functions from a sentence and three assertions (Austin et al., arXiv 2108.07732)."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.tasks.base import Split
from refusion_lit.tasks.code import CodeTask, extract_code
from refusion_lit.tasks.protocol import Protocol, read_protocol
from refusion_lit.tasks.readers import Row, text_field
from refusion_lit.types import Example
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class Mbpp(CodeTask):
    """974 problems with the published splits: tasks 11 to 510 test, 511 to 600 validation, the others training.

    The source is the published files or the hub data set ``google-research-datasets/mbpp``. Tasks 1 to 10, which the
    authors use as few-shot examples, are in the training split.

    Attributes:
        template: The query, where ``{text}`` and ``{tests}`` stand for the problem's sentence and assertions.
    """

    template: str = "{text}\nThe function has to pass these tests:\n{tests}\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("{text}" in self.template, "task.template", "a text with {text} in it", self.template, "add {text}")
        _ = self._protocol  # a wrong file is refused at once

    @property
    def _protocol(self) -> Protocol:
        return read_protocol(self.protocol, ("text", "tests"))

    def read(self, row: Row) -> tuple[Split, Example]:
        """Convert a row of the published format."""
        assert row.values is not None
        number, tests = row.values.get("task_id"), row.values.get("test_list")
        if not isinstance(number, int):
            raise ValueError(f"{row.location}: expected an integer in field 'task_id', got {number!r}; correct it.")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError(
                f"{row.location}: expected a list of assertions in field 'test_list', got {tests!r:.80}; correct it."
            )
        names = ("text", "code", "test_setup_code")
        text, code, setup = [text_field(row, name).replace("\r\n", "\n") for name in names]
        query = self._protocol.query(self.template, {"text": text, "tests": "\n".join(tests)})
        split: Split = "test" if 11 <= number <= 510 else "validation" if 511 <= number <= 600 else "train"
        example = Example(id=f"MBPP/{number}", query=query, response=code, meta={"setup": setup, "tests": tests})
        return split, example

    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return the response's code, and the problem's setup code with its assertions."""
        return extract_code(self._protocol.answer_in(response)), "\n".join(
            [example.meta["setup"], *example.meta["tests"], ""]
        )
