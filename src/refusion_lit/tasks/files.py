"""Instruction data from files or a hub data set as a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from refusion_lit.noise import uniform_scalar
from refusion_lit.tasks.base import Split, Task
from refusion_lit.tasks.readers import Row, read_rows, text_field, unicode_text
from refusion_lit.types import Example

_PRESETS: Mapping[str, tuple[str, str]] = {
    "query_response": ("query", "response"),
    "question_answer": ("question", "answer"),
    "instruction": ("instruction", "output"),
    "messages": ("messages", "messages"),
}


@dataclass(frozen=True, kw_only=True)
class InstructionFiles(Task):
    """Queries with responses, read from JSON, JSONL (also ``.gz``) or Parquet files, or from a hub data set.

    Attributes:
        train: File or files to learn from; with ``dataset``, the name of its split (``train`` by default).
        validation: Files or split to validate on; ``None`` takes the data set's, if it has one, else
            ``validation_fraction`` of the training samples.
        test: Files or split to test and predict on; ``None`` takes the data set's, if it has one, else the
            validation samples.
        validation_fraction: Part of the training samples set aside, in [0, 1); which ones depends on their text alone.
        preset: Names of the fields: ``query``/``response``, ``question``/``answer``,
            ``instruction``/``input``/``output``, or chat ``messages``, whose last assistant turn is the response.
        query_field: Another name of the query's field.
        response_field: Another name of the response's field.
        dataset: Id of a hub data set, whose splits take the place of files (``pip install refusion-lit[data]``).
        dataset_name: Its configuration.
        dataset_revision: Its pinned revision.
        malformed: Stop with an ``error`` at a sample that cannot be used, or ``skip`` and count it.
        num_malformed: Samples skipped, by what was read: train, validation, test.
    """

    train: list[str] | str | None = None
    validation: list[str] | str | None = None
    test: list[str] | str | None = None
    validation_fraction: float = 0.05
    preset: Literal["query_response", "question_answer", "instruction", "messages"] = "query_response"
    query_field: str | None = None
    response_field: str | None = None
    dataset: str | None = None
    dataset_name: str | None = None
    dataset_revision: str | None = None
    malformed: Literal["error", "skip"] = "error"
    num_malformed: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    _read: dict[str, list[Example]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse options that say nothing or contradict each other."""
        if self.train is None and self.test is None and self.dataset is None:
            raise ValueError("task.train: expected files, or a hub data set in task.dataset, got neither; give one.")
        if self.preset == "messages" and self.response_field is not None:
            raise ValueError(
                "task.response_field: expected none with preset 'messages', whose last assistant turn is the response, "
                f"got {self.response_field!r}; remove it (query_field names the field of the turns)."
            )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"task.validation_fraction: expected a number in [0, 1), got {self.validation_fraction}; change it."
            )

    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples; files are read once."""
        if split == "test" and self._source("test") is None:
            split = "validation"
        if split == "validation" and self._source("validation") is None:
            return [e for e in self._all("train") if self._is_set_aside(e)]
        found = self._all(split)
        if split == "train" and self._source("validation") is None:
            return [e for e in found if not self._is_set_aside(e)]
        return found

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response is the reference, white space at the ends aside."""
        return float(response.strip() == example.response.strip())

    def rows(self) -> Iterator[Row]:
        """Read all rows of the training files, or of all splits of the hub data set, as they are.

        Raises:
            ValueError: If something cannot be read, naming it.
        """
        sources = self._dataset_splits if self.dataset is not None else self._source("train") or []
        for source in sources:
            yield from self._rows(source)

    def _source(self, split: Split) -> list[str] | None:
        files = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if files is None and self.dataset is not None:
            return [split] if split in self._dataset_splits else None
        return [files] if isinstance(files, str) else files

    def _is_set_aside(self, example: Example) -> bool:
        return uniform_scalar("validation", example.query, example.response) < self.validation_fraction

    def _all(self, split: Split) -> list[Example]:
        if split not in self._read:
            sources = self._source(split)
            if sources is None:
                raise ValueError(f"task.{split}: expected files, got none; name them.")
            labels = _labels(sources, f"task.{split}")
            rows = ((row, label) for source, label in zip(sources, labels, strict=True) for row in self._rows(source))
            examples: list[Example] = []
            skipped = 0
            for row, label in rows:
                try:
                    examples.append(self._example(row, f"{split}:{label}:{row.line}"))
                except ValueError:
                    if self.malformed == "error":
                        raise
                    skipped += 1
            self.num_malformed[split] = skipped
            self._read[split] = examples
        return self._read[split]

    def _rows(self, source: str) -> Iterator[Row]:
        if self.dataset is None:
            return read_rows(source)
        if source not in self._dataset_splits:
            raise ValueError(
                f"task.dataset: expected a split of {self.dataset}, got {source!r}; it has "
                f"{', '.join(self._dataset_splits)}. Name them as task.train, task.validation and task.test."
            )
        with _named_errors(self.dataset):
            loaded = _hub().load_dataset(self.dataset, self.dataset_name, split=source, revision=self.dataset_revision)
        name = f"{self.dataset}/{source}"
        return (Row(name, number, dict(values)) for number, values in enumerate(loaded, start=1))

    @cached_property
    def _dataset_splits(self) -> list[str]:
        with _named_errors(self.dataset):
            return _hub().get_dataset_split_names(self.dataset, self.dataset_name, revision=self.dataset_revision)

    def _example(self, row: Row, identity: str) -> Example:
        if row.values is None:
            raise ValueError(f"{row.where}: {row.error}; mend the line, or set malformed: skip.")
        if self.preset == "messages":
            return _from_messages(row, identity, self.query_field or "messages")
        query_field, response_field = _PRESETS[self.preset]
        query = text_field(row, self.query_field or query_field)
        response = text_field(row, self.response_field or response_field)
        if self.preset == "instruction" and row.values.get("input"):
            query = f"{query}\n\n{text_field(row, 'input')}"
        if not response.strip():
            raise ValueError(f"{row.where}: expected a response, got an empty one; remove it, or set malformed: skip.")
        return Example(id=identity, query=query, response=response)


def _from_messages(row: Row, identity: str, name: str) -> Example:
    assert row.values is not None
    turns: Any = row.values.get(name)
    usable = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) and isinstance(turn.get("role"), str)
        for turn in turns
    )
    if not usable:
        raise ValueError(f"{row.where}: expected in field {name!r} a list of turns with role and content.")
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
    if last == 0 or not turns[last]["content"].strip():
        raise ValueError(f"{row.where}: expected an assistant's turn with text behind another turn.")
    for turn in turns[: last + 1]:
        unicode_text(row, name, turn["role"] + turn["content"])
    before = tuple({"role": turn["role"], "content": turn["content"]} for turn in turns[:last])
    return Example(id=identity, query=before[-1]["content"], response=turns[last]["content"], messages=before)


def _labels(sources: list[str], option: str) -> list[str]:
    """Return short names that tell sources apart, for ids: file names or, where those repeat, paths."""
    if len(set(sources)) < len(sources):
        raise ValueError(f"{option}: expected each file once, got {sources}; remove what repeats.")
    names = [Path(source).name for source in sources]
    return names if len(set(names)) == len(names) else sources


@contextmanager
def _named_errors(dataset: str | None) -> Iterator[None]:
    """Say in one line what the hub has against a data set."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if str(error).startswith("task."):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"task.dataset: the hub data set {dataset!r} cannot be loaded ({reason}). "
            "Check task.dataset, task.dataset_name and task.dataset_revision, and the network."
        ) from error


def _hub() -> Any:  # noqa: ANN401 - a module
    try:
        import datasets  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise ValueError("task.dataset: needs the package datasets; install refusion-lit[data].") from error
    return datasets
