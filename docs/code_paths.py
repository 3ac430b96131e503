"""Counts the files and lines that a reader meets in the life of a request, a training batch or a test.

usage: python docs/code_paths.py [--json]

A file counts, with all its lines, if one of its functions runs between the start and the end of the way. What runs
while modules are imported or a model is loaded is left out in all ways but ``test``, and so is the fused body. Lines
are code, text (docstrings and comments that fill a line) or blank. The columns: all lines, code, text, and the code of
the functions that run. With ``--json``, only the totals, those of the whole package included.
``tests/docs/test_code_paths.py`` sets bounds for them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "refusion_lit"
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"
FUSED_BODY = "modeling/fused/"
LEFT_OUT = ("<module>", "load_model_of", "configure_optimizers", "on_before_optimizer_step", "factor")
"""Functions whose calls are left out, with all that they call."""
BACKBONE = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@cache
def is_ours(file: str) -> bool:
    """Whether a file belongs to the package and is Python's: templates of HTML run as functions, too."""
    return file.startswith(f"{PACKAGE}{os.sep}") and file.endswith(".py")


def functions_of(way: Callable[[], object]) -> dict[str, set[CodeType]]:
    """Return the functions that run, by file of the package."""
    found: dict[str, set[CodeType]] = {}
    depth = 0

    def leave(_: FrameType, event: str, __: object) -> TraceFunction:
        nonlocal depth
        depth -= event == "return"
        return leave

    def enter(frame: FrameType, _: str, __: object) -> TraceFunction | None:
        nonlocal depth
        code = frame.f_code
        if code.co_name in LEFT_OUT:
            depth += 1
            frame.f_trace_lines = False
            return leave
        if not depth and is_ours(code.co_filename):
            found.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), set()).add(code)
        return None

    sys.settrace(enter)  # told of calls in Python alone, where a profiler is told of calls of C functions, too
    try:
        way()
    finally:
        sys.settrace(None)
    return found


def line_counts(file: str, functions: Iterable[CodeType]) -> list[int]:
    """Return a file's lines: all, code, text, and the code of some of its functions."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    text = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    spans: dict[int, range] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                text.update(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.FunctionDef() | ast.Lambda():
                first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
                spans[first] = range(first, (node.end_lineno or 0) + 1)
    code = {number for number, line in enumerate(lines, 1) if line.strip()} - text
    running = {line for function in functions for line in spans.get(function.co_firstlineno, ())}
    return [len(lines), len(code), len(text), len(code & running)]


def command_to_text(_: Path) -> Callable[[], object]:
    """From the command line to the printed text."""
    from refusion_lit.cli import main

    arguments = ["generate", "--ckpt_path", str(MODEL), "--prompt", "12+34,56+78>", "--max_new_tokens", "32"]
    return lambda: main(arguments)


def ids_to_text(_: Path) -> Callable[[], object]:
    """From ``TextModel.generate_ids`` to text, on transformers' body."""
    import refusion_lit
    from refusion_lit.modeling.loading import BackboneConfig

    model = refusion_lit.load(MODEL, overrides=BackboneConfig(source=str(MODEL), fused_body=False))
    return lambda: model.generate_ids([[4, 5, 13, 6, 7, 17]], max_new_tokens=32)


def examples_to_loss(folder: Path) -> Callable[[], object]:
    """From a file of examples to the hybrid loss of a batch."""
    import lightning as L

    from refusion_lit import SlotDiffusionModule
    from refusion_lit.data.module import InstructionDataModule
    from refusion_lit.data.tokenizers import CharacterTokenizer
    from refusion_lit.modeling.loading import BackboneConfig
    from refusion_lit.objectives import Hybrid
    from refusion_lit.tasks import InstructionFiles

    task = InstructionFiles(train=str(examples(folder)), preset="query_response")
    data = InstructionDataModule(task, CharacterTokenizer(characters="0123456789+=;,> "), batch_size=4)
    module = SlotDiffusionModule(BackboneConfig(config=BACKBONE), data.built_tokenizer, Hybrid(slot_sizes=(4,)))
    module.configure_model()
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    return lambda: trainer.fit(module, data.train_dataloader())


def test_to_report(folder: Path) -> Callable[[], object]:
    """From the command line of a test to its table, results and report."""
    from refusion_lit.cli import main

    task = {"class_path": "InstructionFiles", "init_args": {"test": str(examples(folder)), "preset": "query_response"}}
    config = {"data": {"task": task, "max_eval_prompts": 4}, "model": {"sampling": {"max_new_tokens": 16}}}
    path = folder / "test.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    arguments = ["test", "--config", str(path), "--ckpt_path", str(MODEL), "--runs_dir", str(folder),
                 "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]  # fmt: skip
    return lambda: main(arguments)


def examples(folder: Path) -> Path:
    """Write a file of examples."""
    path = folder / "examples.jsonl"
    path.write_text('{"query": "12+34>", "response": "12+34=46;"}\n' * 8, encoding="utf-8")
    return path


WAYS = {"command to text": command_to_text, "token ids to text": ids_to_text, "examples to loss": examples_to_loss,
        "test": test_to_report}  # fmt: skip


def lines_of(make: Callable[[Path], Callable[[], object]]) -> dict[str, list[int]]:
    """Return the line counts of each file on a way, by the file's name."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        functions = functions_of(make(Path(folder)))
    return {file: line_counts(file, functions[file]) for file in sorted(functions) if FUSED_BODY not in file}


def totals() -> dict[str, int]:
    """Return files and lines of every way and of the whole package."""
    found = {}
    for name, make in WAYS.items():
        lines = lines_of(make)
        found[f"{name}: files"] = len(lines)
        found[f"{name}: lines"] = sum(numbers[0] for numbers in lines.values())
    package = [line_counts(str(path.relative_to(PACKAGE)), ()) for path in sorted(PACKAGE.rglob("*.py"))]
    return found | {
        "package: files": len(package),
        "package: lines": sum(numbers[0] for numbers in package),
        "package: lines of code": sum(numbers[1] for numbers in package),
    }


def main() -> None:
    """Print a table for each way, or the totals as JSON."""
    if "--json" in sys.argv[1:]:
        print(json.dumps(totals()))
        return
    for name, make in WAYS.items():
        lines = lines_of(make)
        total, code, text, running = (sum(column) for column in zip(*lines.values(), strict=True))
        print(f"{name}: {len(lines)} files, {total} lines: {code} of code ({running} in functions that run), "
              f"{text} of docstrings and comments, {total - code - text} blank")  # fmt: skip
        for file, numbers in lines.items():
            print("".join(f"{n:6d}" for n in numbers), file)


if __name__ == "__main__":
    main()
