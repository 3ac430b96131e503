"""``refusion-lit score``: score a predictions file again, without decoding, after the scorer was corrected."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from refusion_lit.cli.messages import print_warning
from refusion_lit.cli.parser import OneLineParser
from refusion_lit.data.examples import load_examples
from refusion_lit.evaluation.predictions import check_writable, read_json_lines, write_predictions
from refusion_lit.reports.results import CONFIG
from refusion_lit.tasks import CodeTask, Example, Task
from refusion_lit.tasks.base import score_response
from refusion_lit.utils.files import read_fingerprint
from refusion_lit.utils.require import require, require_at_least


def build_parser() -> OneLineParser:
    """Return the parser of ``score``."""
    parser = OneLineParser(prog="refusion-lit score", description="Score a predictions file.")
    parser.add_argument("predictions", type=str, help="JSON lines that test, predict or generate wrote")
    task = "class of the task, or a YAML file, with the options that the predictions were made with"
    parser.add_argument("--task", type=Task, required=True, sub_configs=True, help=task)
    output = "where to write the predictions with their new scores; NAME.scored.jsonl beside the input by default"
    parser.add_argument("--output", type=str | None, default=None, help=output)
    parser.add_argument("--overwrite", action="store_true", help="replace the file --output, even if it is not ours")
    parser.add_argument("--num_workers", type=int, default=1, help="responses scored at the same time")
    parser.add_argument("--allow_code_execution", action="store_true",
                        help="run programs that a model wrote, sandboxed, on this machine")  # fmt: skip
    return parser


def run(args: list[str]) -> int:
    """Score a predictions file.

    Raises:
        ValueError: If an option or a prediction is wrong, or code would run without permission.
    """
    options = build_parser().parse(args)
    source = Path(options.predictions)
    require(not source.is_dir(), "predictions", "a file", str(source), "name a file in that directory")
    unpacked = source.with_suffix("") if source.suffix == ".gz" else source
    output = Path(options.output) if options.output else unpacked.with_suffix(".scored.jsonl")
    require_at_least("num_workers", options.num_workers, 1)
    check_writable(output, overwrite=options.overwrite, source=source)
    task = options.task
    if isinstance(task, CodeTask):
        task = replace(task, allow_code_execution=options.allow_code_execution or task.allow_code_execution)
        _ = task.sandbox.applied  # refuses to run code, or weak isolation, before anything else
    examples = {example.id: example for example in load_examples(task, "test")}
    lines = read_json_lines(source, "predictions", texts=("id", "response"))
    require(bool(lines), "predictions", "at least one prediction", f"an empty file {source}", "give another file")
    _check_predictions(lines, examples, source)
    with ThreadPoolExecutor(options.num_workers) as pool:
        scores = list(pool.map(lambda line: score_response(task, examples[line["id"]], line["response"]), lines))
    new_lines = (
        {key: value for key, value in line.items() if key != "metrics"}
        | {"score": score, **({"metrics": metrics} if metrics else {})}
        for line, (score, metrics) in zip(lines, scores, strict=True)
    )
    write_predictions(output, new_lines, read_fingerprint(source) or {})
    figures: dict[str, float | int] = {
        "score": sum(score or 0.0 for score, _ in scores) / len(scores),
        "num_predictions": len(scores),
        "num_changed": sum(line.get("score") not in (None, new) for line, (new, _) in zip(lines, scores, strict=True)),
    }
    figures |= {name: sum(metrics.get(name, 0.0) for _, metrics in scores) / len(scores) for name in task.metrics}
    figures["num_without_prediction"] = len(examples.keys() - {line["id"] for line in lines})
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stderr.write(f"wrote {output}\n")
    return 0


def _check_predictions(lines: Sequence[dict[str, Any]], examples: dict[str, Example], source: Path) -> None:
    """Refuse predictions whose prompts are not the task's. Ids do not suffice: every seed and size has the same ids."""
    config = source.parent / CONFIG
    hint = f"; data.task in {config} has them" if config.is_file() else ""
    unknown = [line["id"] for line in lines if line["id"] not in examples]
    got = f"{len(unknown)} of {len(lines)} ids that are not, such as {unknown[:1]}"
    fix = f"give --task as it was when the predictions were made{hint}"
    require(not unknown, "predictions", f"ids of the task's test split in {source}", got, fix)
    (identity, count), *_ = Counter(line["id"] for line in lines).most_common(1)
    got = f"{identity} {count} times in {source}"
    require(count == 1, "predictions", "different ids", got, "keep one line per id")
    for line in lines:
        got = line.get("prompt")
        expected = examples[line["id"]].query
        if got is not None and got != expected:
            raise ValueError(
                f"predictions: {source} was made for other prompts: the prompt of {line['id']!r} was "
                f"{got!r:.80}, is {expected!r:.80} in the task; give --task with the options that the predictions "
                f"were made with{hint}."
            )
    if any(line.get("prompt") is None for line in lines):
        print_warning(f"{source} has lines without a prompt, which are matched by their ids alone")
