"""Tasks whose responses are programs, which are scored by running them: HumanEval and MBPP."""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from refusion_lit.sandbox.runner import LEVELS, Level, ResourceLimits, Sandbox
from refusion_lit.tasks.base import Example, Split
from refusion_lit.tasks.files import FileTask
from refusion_lit.utils.require import require, require_choice
from refusion_lit.utils.rows import DataRow

_FENCED = re.compile(r"```([^\n`]*+)\n(.*?)(?:(?:(?<=\n)|\r?\n)[ \t]*+```|\Z)", re.DOTALL)
# Start of a top-level statement: a model that continues the function's body has finished it here.
_END_OF_BODY = re.compile(r"\n(?=class\s|def\s|async def\s|@|#|if\s|print\b|assert\s|```|<\|)")


@dataclass(frozen=True, kw_only=True)
class CodeTask(FileTask):
    """Programming problems from a file or a hub data set. A response scores 1 if its program passes the tests.

    Generated code runs only with ``allow_code_execution``. Without it, scores are missing from the predictions, and
    ``refusion-lit score`` computes them later from the predictions file.

    Attributes:
        files: The benchmark's file or files (JSON or JSONL, also ``.gz``).
        allow_code_execution: Whether generated code may run on this machine.
        minimum_isolation: Minimum isolation for generated code: resource ``limits`` only, or ``full`` (no access to
            outside files, no network, no processes).
        limits: Resource limits per program.
    """

    files: list[str] | str | None = None
    allow_code_execution: bool = False
    minimum_isolation: Level = "full"
    limits: ResourceLimits = field(default_factory=ResourceLimits)

    def __post_init__(self) -> None:
        is_one = (self.files is None) != (self.dataset is None)
        got = "neither" if self.files is None else "both"
        require(is_one, "task.files", "either files or a hub data set in task.dataset", got, "set exactly one")
        require_choice("minimum_isolation", self.minimum_isolation, LEVELS)

    @abstractmethod
    def read(self, row: DataRow) -> tuple[Split, Example]:
        """Return a row's split and example; the example's id names the problem.

        Raises:
            ValueError: If a field is missing; the message names file and line.
        """

    @abstractmethod
    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return a response's program and the problem's tests."""

    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples."""
        return self._problems[split]

    def score(self, example: Example, response: str) -> float | None:
        """Return 1 if the response's program passes the tests, else 0; ``None`` if running it is not allowed."""
        if self.allow_code_execution:
            return float(self.sandbox.run(*self.program(example, response)).passed)
        return None

    @cached_property
    def sandbox(self) -> Sandbox:
        """The sandbox for generated code; the first access prints the available isolation.

        Raises:
            ValueError: If code may not run, or the machine offers too little isolation.
        """
        expected = "true, because scoring runs programs that a model wrote on this machine"
        fix = "set it to allow that"
        require(self.allow_code_execution, "allow_code_execution", expected, False, fix)
        sandbox = Sandbox(limits=self.limits, minimum=self.minimum_isolation)
        sys.stderr.write(f"isolation of generated code: {sandbox.describe()}\n")
        return sandbox

    @cached_property
    def _problems(self) -> Mapping[Split, list[Example]]:
        problems: dict[Split, list[Example]] = {"train": [], "validation": [], "test": []}
        sources = [self.files] if isinstance(self.files, str) else self.files or self.hub_splits
        seen: set[str] = set()
        for row in chain.from_iterable(map(self.read_source, sources)):
            split, example = self.read(row)
            if example.id in seen:
                raise ValueError(f"{row.location}: expected each problem once, got {example.id} again; remove one.")
            seen.add(example.id)
            problems[split].append(example)
        return problems


@dataclass(frozen=True, kw_only=True)
class HumanEval(CodeTask):
    r"""HumanEval (Chen et al., arXiv 2107.03374): 164 Python functions to complete from their docstrings.

    The source is the file or the hub data set ``openai/openai_humaneval``. All problems are in the test split.
    A response is either the body that continues the prompt or the whole function, fenced or not. A whole function runs
    after the prompt, so that it can use the prompt's imports and helpers.

    Attributes:
        template: The query, where ``{prompt}`` stands for the problem's prompt.

    >>> task = HumanEval(files="HumanEval.jsonl.gz")
    >>> problem = {"prompt": "def double(x):\n", "test": "def check(f): assert f(2) == 4", "entry_point": "double"}
    >>> example = Example(id="0", query="def double(x):\n", response="    return 2 * x\n", meta=problem)
    >>> program, tests = task.program(example, "    return x + x\n\nprint(double(2))")
    >>> print(program, end="")  # without what follows the function
    def double(x):
        return x + x
    """

    template: str = "{prompt}"

    def __post_init__(self) -> None:
        super().__post_init__()
        has_prompt = "{prompt}" in self.template
        require(has_prompt, "task.template", "a text with {prompt} in it", self.template, "add {prompt}")

    def read(self, row: DataRow) -> tuple[Split, Example]:
        """Convert a row of the published format."""
        names = ("prompt", "canonical_solution", "test", "entry_point", "task_id")
        prompt, solution, test, entry_point, identity = map(row.text, names)
        meta = {"prompt": prompt, "test": test, "entry_point": entry_point}
        query = self.template.replace("{prompt}", prompt)
        return "test", Example(id=identity, query=query, response=solution, meta=meta)

    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return the prompt with the response, and the problem's check."""
        prompt = example.meta["prompt"]
        name = example.meta["entry_point"]
        code = extract_code(response)
        if re.search(rf"^(async )?def {re.escape(name)}\b", code, re.MULTILINE):
            program = f"{prompt}\n{code}\n"  # the prompt alone is valid: a function with only a docstring
        else:
            program = prompt + _END_OF_BODY.split(code, maxsplit=1)[0] + "\n"
        return program, f"{example.meta['test']}\ncheck({name})\n"


@dataclass(frozen=True, kw_only=True)
class Mbpp(CodeTask):
    r"""MBPP (Austin et al., arXiv 2108.07732): 974 short Python functions from a sentence and three assertions.

    The source is the file or the hub data set ``google-research-datasets/mbpp``. The splits are as published: tasks 11
    to 510 for the test, 511 to 600 for validation, the others for training. Training includes the authors' few-shot
    examples, tasks 1 to 10.

    Attributes:
        template: The query, where ``{text}`` and ``{tests}`` stand for the problem's sentence and assertions.

    >>> task = Mbpp(files="mbpp.jsonl")
    >>> tests = {"setup": "", "tests": ["assert double(2) == 4"]}
    >>> example = Example(id="MBPP/11", query="Double a number.", response="...", meta=tests)
    >>> task.program(example, "```python\ndef double(x): return 2 * x\n```")[0]
    'def double(x): return 2 * x'
    """

    template: str = "{text}\nThe function has to pass these tests:\n{tests}\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("{text}" in self.template, "task.template", "a text with {text} in it", self.template, "add {text}")

    def read(self, row: DataRow) -> tuple[Split, Example]:
        """Convert a row of the published format."""
        values = row.require_values()
        number = values.get("task_id")
        tests = values.get("test_list")
        if not isinstance(number, int):
            raise ValueError(f"{row.location}: expected an integer in field 'task_id', got {number!r}; number it.")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError(
                f"{row.location}: expected a list of assertions in field 'test_list', got {tests!r:.80}; list them."
            )
        names = ("text", "code", "test_setup_code")
        text, code, setup = [row.text(name).replace("\r\n", "\n") for name in names]
        fields = {"{text}": text, "{tests}": "\n".join(tests)}
        query = re.sub("|".join(map(re.escape, fields)), lambda match: fields[match[0]], self.template)
        split: Split = "test" if 11 <= number <= 510 else "validation" if 511 <= number <= 600 else "train"
        example = Example(id=f"MBPP/{number}", query=query, response=code, meta={"setup": setup, "tests": tests})
        return split, example

    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return the response's code, and the problem's setup code with its assertions."""
        return extract_code(response), "\n".join([example.meta["setup"], *example.meta["tests"], ""])


def extract_code(response: str) -> str:
    r"""Return a response's longest fenced block, in Python or without a language. Without fences, return the response.

    >>> extract_code("Sure:\n```python\nx = 1\n```\nDone.")
    'x = 1'
    """
    blocks = [
        code for name, code in _FENCED.findall(response) if name.strip().lower() in ("", "python", "py", "python3")
    ]
    return max(blocks, key=len) if blocks else response
