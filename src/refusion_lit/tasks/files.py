"""Instruction data: rows of files, and the examples that they become."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from refusion_lit.noise import uniform_scalar
from refusion_lit.tasks.base import Example, Split
from refusion_lit.tasks.hub import HubTask
from refusion_lit.utils.require import require, require_number

Preset = Literal["query_response", "question_answer", "instruction", "messages"]
Keep = Literal["all", "finished", "correct"]
_FIELDS: Mapping[Preset, tuple[str, str]] = {
    "query_response": ("query", "response"),
    "question_answer": ("question", "answer"),
    "instruction": ("instruction", "output"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a file.

    Attributes:
        file: Path of the file, as given.
        line: Line number in a JSONL file, number of the object in other files; from 1.
        values: The object; ``None`` if it cannot be read.
        error: Why it cannot be read.
    """

    file: str
    line: int
    values: Mapping[str, Any] | None
    error: str = ""

    @property
    def location(self) -> str:
        """File and line, for error messages."""
        return f"{self.file}:{self.line}"


def read_rows(file: str) -> Iterator[Row]:
    """Read a JSON or JSONL file (also ``.gz``).

    Args:
        file: Path of the file; its suffix determines the format.

    Yields:
        One row per object. An invalid line of a JSONL file, or an entry that is not an object, is a row with an error.

    Raises:
        ValueError: If the file is missing, empty, not UTF-8, or invalid as a whole.
    """
    path = Path(file)
    name = path.name.removesuffix(".gz")
    if path.is_file() and not name.endswith((".json", ".jsonl")):
        raise ValueError(f"{file}: expected a name ending in .json, .jsonl, .json.gz or .jsonl.gz; rename it.")
    read = json_rows if name.endswith(".jsonl") else _read_json_list
    is_empty = True
    for row in read(file, decompressed_text(path)):
        is_empty = False
        yield row
    if is_empty:
        raise ValueError(f"{file}: expected at least one sample, got an empty file; give another.")


def values_of(row: Row, fix: str = "correct the line") -> Mapping[str, Any]:
    """Return the object of a row.

    Raises:
        ValueError: If it cannot be read.
    """
    if row.values is None:
        raise ValueError(f"{row.location}: {row.error}; {fix}.")
    return row.values


def text_field(row: Row, field: str, fix: str = "add it") -> str:
    """Return the text in a field of a row; ``fix`` says what to do where it is missing.

    Raises:
        ValueError: If the field is missing (the message suggests the nearest name) or not text.
    """
    values = values_of(row)
    if field not in values:
        close = get_close_matches(field, list(values), n=1)
        names = ", ".join(map(repr, values)) or "none"
        hint = f"did you mean {close[0]!r}?" if close else f"it has {names}; {fix}."
        raise ValueError(f"{row.location}: expected a field {field!r}; {hint}")
    value = values[field]
    if not isinstance(value, str):
        raise ValueError(f"{row.location}: expected text in field {field!r}, got {type(value).__name__}; quote it.")
    return unicode_text(row, field, value)


def unicode_text(row: Row, field: str, text: str) -> str:
    """Return the text of a field after checking that it can be encoded.

    Raises:
        ValueError: If it has a lone surrogate, which JSON can contain but no encoding can represent.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{row.location}: expected Unicode in field {field!r}, got a lone surrogate; remove its \\udXXX."
        ) from error
    return text


def decompressed_text(path: Path) -> str:
    """Return the text of a UTF-8 file, compressed (``.gz``) or not.

    Raises:
        ValueError: If it does not exist or cannot be read; the message names file and line.
    """
    if not path.is_file():
        raise ValueError(f"{path}: expected a data file, but there is none; check the path (relative to {Path.cwd()}).")
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{line}: expected UTF-8 text, got another encoding ({error.reason}); convert it."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error}); fetch it again.") from error


def json_rows(file: str, text: str) -> Iterator[Row]:
    """Yield the rows of JSON Lines; blank lines are skipped, and an invalid line is a row with an error.

    Only a line feed ends a line: other line separators of Unicode, such as U+2028, are characters of a text.

    Args:
        file: Where the text comes from, for messages.
        text: The lines.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _row(file, number, json.loads(line))
        except (ValueError, RecursionError) as error:
            row = Row(file, number, None, f"broken JSON ({error})")
        yield row


def _read_json_list(file: str, text: str) -> Iterator[Row]:
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"{file}:{line}: broken JSON ({error}); if it is JSONL, rename it to .jsonl.") from error
    if not isinstance(values, list):
        raise ValueError(f"{file}: expected a list of objects, got {type(values).__name__}; put it into a list.")
    for number, value in enumerate(values, start=1):
        yield _row(file, number, value)


def _row(file: str, number: int, values: object) -> Row:
    if not isinstance(values, dict):
        return Row(file, number, None, f"expected a JSON object, got {type(values).__name__}")
    return Row(file, number, values)


def rows_of(task: HubTask, source: str) -> Iterator[Row]:
    """Return the rows of a task's file or, if it has a hub data set, of one of its splits.

    Raises:
        ValueError: If it cannot be read; the message names it.
    """
    if task.dataset is None:
        return read_rows(source)
    loaded = task.hub_rows(source)
    return (Row(f"{task.dataset}/{source}", number, dict(row)) for number, row in enumerate(loaded, start=1))


@dataclass(frozen=True, kw_only=True)
class InstructionFiles(HubTask):
    """Queries with responses from JSON or JSONL files (also ``.gz``), or from a hub data set.

    The ``id`` of a row, text or an integer, is the example's id; a row without one is named by split, file and line.

    Attributes:
        train: Training file or files; with ``dataset``, the name of its training split (default ``train``).
        validation: Validation files or split. ``None`` uses the data set's ``validation`` split if it has one, else
            holds out ``validation_fraction`` of the training samples.
        test: Test and prediction files or split. ``None`` uses the data set's ``test`` split if it has one, else the
            validation samples.
        validation_fraction: Fraction of the training samples to hold out, in [0, 1). The choice of a sample depends
            only on its text.
        preset: Field names: ``query``/``response``, ``question``/``answer``, ``instruction``/``input``/``output``, or
            chat ``messages`` whose last assistant turn is the response.
        query_field: Name of the query's field, if it differs from the preset's.
        response_field: Name of the response's field, if it differs from the preset's.
        keep: Which samples to train on, and to hold out, if ``train`` has a model's answers as ``generate`` and
            ``predict`` write them: ``all``, those ``finished`` (up to EOS, not empty), or of these the ``correct`` ones
            (score 1).
        malformed: ``error`` raises for a sample that cannot be used; ``skip`` skips and counts it, also where one of
            training or validation cannot be encoded.
        num_malformed: Number of skipped samples of each split that has been read.
        num_left_out: Number of samples of each split that ``keep`` left out.
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
        return [e for e in self._read_split("train") if self._is_held_out(e) == (split == "validation")]

    def tested(self) -> str:
        """Return whether test examples have a source of their own, or are the validation examples."""
        if self._sources("test") is not None:
            return "test split"
        held_out = " held out of the training files" if self._sources("validation") is None else ""
        return f"validation examples{held_out}"

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference except for surrounding white space, else 0."""
        return float(response.strip() == example.response.strip())

    def _sources(self, split: Split) -> list[str] | None:
        """Return the files (or the data set's splits) of a split; ``None`` if it has none."""
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
            rows = ((row, labels[source]) for source in sources for row in rows_of(self, source))
            examples: list[Example] = []
            num_skipped = num_left_out = 0
            places: dict[str, str] = {}
            for row, label in rows:
                try:
                    if split == "train" and not self._is_kept(row):
                        num_left_out += 1
                        continue
                    example = self._example(row, _own_id(row) or f"{split}:{label}:{row.line}")
                    place = places.setdefault(example.id, row.location)
                    expected = f"an id of its own, not that of {place}"
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

    def _is_kept(self, row: Row) -> bool:
        """Return whether ``keep`` takes a row."""
        if self.keep == "all":
            return True
        fix = "let refusion-lit generate or predict write the answers, or set task.keep: all"
        is_finished = text_field(row, "finish_reason", fix) == "eos" and bool(text_field(row, "response").strip())
        if self.keep == "finished" or not is_finished:
            return is_finished
        score = values_of(row).get("score")
        fix = "let refusion-lit score write it, or set task.keep: finished"
        require(isinstance(score, (int, float)), row.location, "a number in field 'score'", score, fix)
        return score == 1

    def _example(self, row: Row, identity: str) -> Example:
        values = values_of(row, "fix the line, or set malformed: skip in the task")
        if self.preset == "messages":
            return _from_messages(row, identity, self.query_field or "messages")
        query_field, response_field = _FIELDS[self.preset]
        hint = "add it, or set task.preset"
        query = text_field(row, self.query_field or query_field, hint)
        response = text_field(row, self.response_field or response_field, hint)
        if self.preset == "instruction" and values.get("input"):
            query = f"{query}\n\n{text_field(row, 'input')}"
        fix = "remove it, or set malformed: skip in the task"
        require(bool(response.strip()), row.location, "a response that is not empty", response, fix)
        return Example(id=identity, query=query, response=response)


def _own_id(row: Row) -> str | None:
    """Return a row's own id; ``None`` if it has none that is text or an integer."""
    value = (row.values or {}).get("id")
    return unicode_text(row, "id", str(value)) if type(value) in (str, int) else None


def _from_messages(row: Row, identity: str, name: str) -> Example:
    turns: Any = values_of(row).get(name)
    is_valid = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) and isinstance(turn.get("role"), str)
        for turn in turns
    )
    if not is_valid:
        raise ValueError(
            f"{row.location}: expected a list of turns with role and content in field {name!r}, got {turns!r:.80}; "
            "correct the field."
        )
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
    if last == 0 or not turns[last]["content"].strip():
        raise ValueError(
            f"{row.location}: expected an assistant turn with text after another turn, got none; add one to {name!r}."
        )
    for turn in turns[: last + 1]:
        unicode_text(row, name, turn["role"] + turn["content"])
    before = tuple({"role": turn["role"], "content": turn["content"]} for turn in turns[:last])
    return Example(id=identity, query=before[-1]["content"], response=turns[last]["content"], messages=before)


def _unique_labels(sources: list[str], option: str) -> dict[str, str]:
    """Return a short label of each source for ids: the file names, or the paths if file names repeat."""
    if len(set(sources)) < len(sources):
        raise ValueError(f"{option}: expected each file once, got {sources}; remove the repetitions.")
    names = [Path(source).name for source in sources]
    return dict(zip(sources, names if len(set(names)) == len(names) else sources, strict=True))
