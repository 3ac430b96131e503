"""Tasks: examples to train and test on, and scores for responses.

Importing this package imports every task class, so that configs can refer to them by class name.
"""

from __future__ import annotations

from refusion_lit.tasks.base import SPLITS, Example, Split, Task
from refusion_lit.tasks.code import CodeTask, HumanEval, Mbpp
from refusion_lit.tasks.files import InstructionFiles
from refusion_lit.tasks.generated import Additions, GeneratedTask, Records, Sheet
from refusion_lit.tasks.gsm8k import Gsm8k

__all__ = [
    "SPLITS",
    "Additions",
    "CodeTask",
    "Example",
    "GeneratedTask",
    "Gsm8k",
    "HumanEval",
    "InstructionFiles",
    "Mbpp",
    "Records",
    "Sheet",
    "Split",
    "Task",
]
