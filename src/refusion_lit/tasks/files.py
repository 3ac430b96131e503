"""Tasks whose examples are rows of files or of a data set on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from refusion_lit.noise import uniform_scalar
from refusion_lit.tasks.base import Example, Split, Task
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require, require_number
from refusion_lit.utils.rows import DataRow, read_rows

Preset = Literal["query_response", "question_answer", "instruction", "messages"]
Keep = Literal["all", "finished", "correct"]
_FIELDS: Mapping[Preset, tuple[str, str]] = {
    "query_response": ("query", "response"),
    "question_answer": ("question", "answer"),
    "instruction": ("instruction", "output"),
}


@dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """A task whose examples are rows of files or of a data set on the Hugging Face hub.

    Attributes:
        dataset: Id of a hub data set to use instead of files (``pip install datasets``).
        dataset_name: Configuration of the data set.
    """

    dataset: str | None = None
    dataset_name: str | None = None

    @cached_property
    def hub_splits(self) -> list[str]:
        """The splits of ``dataset``; empty without a data set."""
        return [] if self.dataset is None else self._call_hub("get_dataset_split_names")

    def read_source(self, source: str) -> Iterator[DataRow]:
        """Return the rows of a file or, with ``dataset``, of a split of the data set.

        Raises:
            ValueError: If the source cannot be read; the message names it.
        """
        if self.dataset is None:
            return read_rows(source)
        known = ", ".join(self.hub_splits)
        fix = f"it has {known}: choose from these in task.train, task.validation and task.test"
        require(source in self.hub_splits, "task.dataset", f"a split of {self.dataset}", source, fix)
        rows = self._call_hub("load_dataset", split=source)
        return (DataRow(f"{self.dataset}/{source}", number, dict(row)) for number, row in enumerate(rows, start=1))

    def _call_hub(self, function: str, **options: str) -> Any:  # noqa: ANN401
        """Call a function of the package ``datasets``; its errors become a one-line ``ValueError``."""
        try:
            import datasets  # pyright: ignore[reportMissingImports] - an extra
        except ImportError as error:
            raise ValueError("task.dataset: needs the package datasets; run pip install datasets.") from error
        try:
            return getattr(datasets, function)(self.dataset, self.dataset_name, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"task.dataset: the hub data set {self.dataset!r} cannot be loaded ({error_reason(error)}). "
                "Check task.dataset and task.dataset_name, and the network."
            ) from error


@dataclass(frozen=True, kw_only=True)
class InstructionFiles(FileTask):
    """Queries with responses from JSON or JSONL files (also ``.gz``), or from a hub data set.

    The ``id`` of a row, text or an integer, is the example's id. A row without ``id`` is named by split, file and line.

    Attributes:
        train: Training file or files; with ``dataset``, the name of its training split (default ``train``).
        validation: Validation files or split. ``None`` uses the data set's ``validation`` split if there is one, and
            otherwise holds out ``validation_fraction`` of the training samples.
        test: Test and prediction files or split. ``None`` uses the data set's ``test`` split if there is one, and
            otherwise the validation samples.
        validation_fraction: Fraction of the training samples to hold out, in [0, 1). Whether a sample is held out
            depends only on its text.
        preset: Field names: ``query``/``response``, ``question``/``answer``, ``instruction``/``input``/``output``, or
            chat ``messages`` whose last assistant turn is the response.
        query_field: Name of the query's field, if it differs from the preset's.
        response_field: Name of the response's field, if it differs from the preset's.
        keep: Which answers of a model, as ``generate`` and ``predict`` write them, are training samples: ``all``,
            ``finished`` (not empty, ended with EOS) or ``correct`` (finished, score 1). Held-out samples follow the
            same rule.
        malformed: ``error`` raises for a sample that cannot be used; ``skip`` skips and counts such samples, including
            training and validation samples that cannot be encoded.
        num_malformed: Number of skipped samples, by split, of the splits read so far.
        num_left_out: Number of samples that ``keep`` left out, by split.

    >>> import json, tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     _ = file.write(json.dumps({"query": "2+3", "response": "5"}))
    ...     file.flush()
    ...     task = InstructionFiles(train=file.name, test=file.name)
    ...     [example] = task.examples("test")
    >>> example.query, example.response
    ('2+3', '5')
    >>> task.score(example, " 5 ")
    1.0
    """

    train: list[str] | str | None = None
    validation: list[str] | str | None = None
    test: list[str] | str | None = None
    validation_fraction: float = 0.05
    preset: Preset = "query_response"
    query_field: str | None = None
    response_field: str | None = None
    keep: Keep = "all"
    malformed: Literal["error", "skip"] = "error"
    num_malformed: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    num_left_out: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    _samples: dict[str, list[Example]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.train is None and self.test is None and self.dataset is None:
            raise ValueError("task.train: expected files, or a hub data set in task.dataset, got neither; set one.")
        is_used = self.preset != "messages" or self.response_field is None
        expected = "none with preset 'messages', whose last assistant turn is the response"
        fix = "remove it (query_field names the field of the turns)"
        require(is_used, "task.response_field", expected, self.response_field, fix)
        fix = "set it to 0.05, for example"
        require_number("task.validation_fraction", self.validation_fraction, "[0, 1)", fix)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split; each file is read once."""
        if split == "test" and self._sources("test") is None:
            split = "validation"
        if split == "test" or self._sources("validation") is not None:
            return self._read_split(split)
        is_validation = split == "validation"
        return [example for example in self._read_split("train") if self._is_held_out(example) == is_validation]

    def describe_test_split(self) -> str:
        """Return whether the test examples are a separate split or the validation examples."""
        if self._sources("test") is not None:
            return "test split"
        held_out = " held out of the training files" if self._sources("validation") is None else ""
        return f"validation examples{held_out}"

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference apart from surrounding white space, else 0."""
        return float(response.strip() == example.response.strip())

    def _sources(self, split: Split) -> list[str] | None:
        """Return the files (or the data set's splits) of a split; ``None`` if there are none."""
        files = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if files is None:
            return [split] if self.dataset is not None and split in self.hub_splits else None
        return [files] if isinstance(files, str) else files

    def _is_held_out(self, example: Example) -> bool:
        return uniform_scalar("validation", example.query, example.response) < self.validation_fraction

    def _read_split(self, split: Split) -> list[Example]:
        if split not in self._samples:
            sources = self._sources(split)
            if sources is None:
                raise ValueError(f"task.{split}: expected files, got none; set task.{split}.")
            labels = _unique_labels(sources, f"task.{split}")
            rows = ((row, labels[source]) for source in sources for row in self.read_source(source))
            examples: list[Example] = []
            num_skipped = num_left_out = 0
            places: dict[str, str] = {}
            for row, label in rows:
                try:
                    if split == "train" and not self._is_kept(row):
                        num_left_out += 1
                        continue
                    example = self._example(row, _read_id(row) or f"{split}:{label}:{row.line}")
                    place = places.setdefault(example.id, row.location)
                    expected = f"a unique id, not the id of {place}"
                    fix = "make it unique, or rename the field"
                    require(place == row.location, row.location, expected, example.id, fix)
                    examples.append(example)
                except ValueError:
                    if self.malformed == "error":
                        raise
                    num_skipped += 1
            self.num_malformed[split], self.num_left_out[split] = num_skipped, num_left_out
            self._samples[split] = examples
        return self._samples[split]

    def _is_kept(self, row: DataRow) -> bool:
        """Return whether ``keep`` selects a row."""
        if self.keep == "all":
            return True
        fix = "let refusion-lit generate or predict write the answers, or set task.keep: all"
        is_finished = row.text("finish_reason", fix) == "eos" and bool(row.text("response").strip())
        if self.keep == "finished" or not is_finished:
            return is_finished
        score = row.require_values().get("score")
        fix = "let refusion-lit score write it, or set task.keep: finished"
        require(isinstance(score, (int, float)), row.location, "a number in field 'score'", score, fix)
        return score == 1

    def _example(self, row: DataRow, identity: str) -> Example:
        values = row.require_values("fix the line, or set malformed: skip in the task")
        if self.preset == "messages":
            return _from_messages(row, identity, self.query_field or "messages")
        query_field, response_field = _FIELDS[self.preset]
        hint = "add it, or set task.preset"
        query = row.text(self.query_field or query_field, hint)
        response = row.text(self.response_field or response_field, hint)
        if self.preset == "instruction" and values.get("input"):
            query = f"{query}\n\n{row.text('input')}"
        fix = "remove it, or set malformed: skip in the task"
        require(bool(response.strip()), row.location, "a response that is not empty", response, fix)
        return Example(id=identity, query=query, response=response)


def _read_id(row: DataRow) -> str | None:
    """Return a row's id; ``None`` unless it is text or an integer."""
    value = (row.values or {}).get("id")
    return row.check_unicode("id", str(value)) if type(value) in (str, int) else None


def _from_messages(row: DataRow, identity: str, name: str) -> Example:
    turns: Any = row.require_values().get(name)
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        wrong = next((turn for turn in turns if not _is_turn(turn)), turns) if isinstance(turns, list) else turns
        raise ValueError(
            f"{row.location}: expected a list of turns with role and content in field {name!r}, got {wrong!r:.80}; "
            "correct the field (content may be null beside tool_calls)."
        )
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
    if last == 0:
        raise ValueError(
            f"{row.location}: expected an assistant turn after another turn, got none; add one to {name!r}."
        )
    for key in ("tool_calls", "reasoning_content", "function_call"):
        expected = f"an answer without {key}: only the text of the last assistant turn is trained"
        require(not turns[last].get(key), f"{row.location}: {name}", expected, turns[last].get(key), f"remove {key}")
    weight = turns[last].get("weight")
    expected = "a weight of 1 or none for the last assistant turn, which is trained"
    require(weight in (None, 1), f"{row.location}: {name}", expected, weight, "remove the row")
    if not (turns[last]["content"] or "").strip():
        raise ValueError(f"{row.location}: expected text in the last assistant turn of {name!r}, got none; write it.")
    for turn in turns[: last + 1]:
        row.check_unicode(name, json.dumps(turn, ensure_ascii=False))
    tools = row.require_values().get("tools")
    meta = {"tools": tools} if tools else {}
    before = tuple(turns[:last])
    query, response = before[-1]["content"] or "", turns[last]["content"]
    return Example(id=identity, query=query, response=response, messages=before, meta=meta)


def _is_turn(turn: object) -> bool:
    """Return whether a value is a chat turn: role, and content, which may be missing beside tool calls."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    return isinstance(turn.get("content"), str) or (turn.get("content") is None and bool(turn.get("tool_calls")))


def _unique_labels(sources: list[str], option: str) -> dict[str, str]:
    """Return a short label for ids by source: the file names, or the paths if file names repeat."""
    if len(set(sources)) < len(sources):
        raise ValueError(f"{option}: expected each file once, got {sources}; remove the repetitions.")
    names = [Path(source).name for source in sources]
    return dict(zip(sources, names if len(set(names)) == len(names) else sources, strict=True))
