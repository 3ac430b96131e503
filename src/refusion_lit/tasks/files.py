"""Tasks whose examples are rows in files or in a data set on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from refusion_lit.noise import uniform_scalar
from refusion_lit.tasks.base import MORE_THAN_TEXT, Example, Split, Task
from refusion_lit.tasks.chat_rows import (
    TRAINING_MARKS,
    has_parts,
    is_context,
    read_earlier_turns,
    read_tools,
    read_turns,
)
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require, require_choice, require_number
from refusion_lit.utils.rows import DataRow, drop_nested_nulls, nans_to_nulls, read_rows, rows_in

Preset = Literal[
    "auto", "query_response", "question_answer", "instruction", "prompt_completion", "messages", "conversations"
]
Keep = Literal["all", "finished", "correct"]
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "query_response": ("query", "response"),
    "question_answer": ("question", "answer"),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "conversations": ("conversations",),
}
_FIX_FIELDS = (
    "add it, or set data.task.query_field and data.task.response_field, or data.task.preset (one of "
    f"{', '.join(_FIELDS)})"
)


@dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """A task whose examples are rows in files or in a data set on the Hugging Face hub.

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
        """Return the rows in a file or, with ``dataset``, in a split of the data set.

        Raises:
            ValueError: If the source cannot be read; the message names it.
        """
        if self.dataset is None:
            return read_rows(source)
        known = ", ".join(self.hub_splits)
        fix = f"it has {known}: choose from these in task.train, task.validation and task.test"
        require(source in self.hub_splits, "task.dataset", f"a split of {self.dataset}", source, fix)
        rows = self._call_hub("load_dataset", split=source)
        numbered = enumerate(rows, start=1)
        return (DataRow(f"{self.dataset}/{source}", number, drop_nested_nulls(row)) for number, row in numbered)

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
    """Queries with responses from JSON, JSONL, CSV (also ``.gz``) or Parquet files, or from a hub data set.

    A row's ``id``, text or an integer, is the example's id. A row without ``id`` is named by split, file and line.
    A chat gives an example for every assistant turn; all but the last have the turn's number in their ids. In Python,
    ``train``, ``validation`` and ``test`` may also be data sets whose items are mappings; see :meth:`from_rows`.

    Attributes:
        train: Training file or files; with ``dataset``, its training split's name (default ``train``).
        validation: Validation files or split. ``None`` uses the data set's ``validation`` split if there is one, and
            otherwise holds out ``validation_fraction`` of the training samples.
        test: Test and prediction files or split. ``None`` uses the data set's ``test`` split if there is one, and
            otherwise the validation samples.
        validation_fraction: Fraction of the training rows to hold out, in [0, 1); at least one row unless it is 0. The
            rows are chosen by hashes of their texts, in whatever order they come.
        preset: Field names: ``query``/``response``, ``question``/``answer``, ``instruction``/``input``/``output``
            (Alpaca), ``prompt``/``completion``, chat ``messages``, or ``conversations`` (ShareGPT's ``from`` and
            ``value``). ``auto``: by the fields of a row.
        assistant_turns: Assistant turns of a chat to train and validate on: ``all`` (an example per turn) or ``last``.
            Turns that are empty or marked by ``weight: 0`` (or ``train``, ``training`` or ``loss``: false) are context.
            A test prompts for the last trained turn.
        assistant_parts: ``text``: assistant turns with tool calls or reasoning are context. A chat that ends with such
            a turn is refused. ``all``: such turns are trained, too, as the chat template renders them.
        query_field: The query field's name, if it differs from the preset's.
        response_field: The response field's name, if it differs from the preset's.
        keep: Which model answers become training samples, in files of ``generate`` or ``predict``: ``all``,
            ``finished`` (not empty, ended with EOS) or ``correct`` (finished, score 1). Held-out samples follow the
            same rule.
        malformed: ``error`` raises for a sample that cannot be used; ``skip`` skips and counts such samples, including
            training and validation samples that cannot be encoded.
        num_malformed: Number of skipped samples, by split, for the splits read so far.
        num_left_out: Number of samples that ``keep`` left out, by split.
        num_context_turns: Number of assistant turns that ``assistant_parts`` makes context, by split.

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
    preset: Preset = "auto"
    assistant_turns: Literal["all", "last"] = "all"
    assistant_parts: Literal["text", "all"] = "text"
    query_field: str | None = None
    response_field: str | None = None
    keep: Keep = "all"
    malformed: Literal["error", "skip"] = "error"
    num_malformed: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    num_left_out: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    num_context_turns: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    # The examples of each row, by split.
    _samples: dict[str, list[list[Example]]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.train is None and self.test is None and self.dataset is None:
            raise ValueError("task.train: expected files, or a hub data set in task.dataset, got neither; set one.")
        require_choice("data.task.preset", self.preset, get_args(Preset))
        require_choice("data.task.assistant_turns", self.assistant_turns, ("all", "last"))
        is_chat = self.preset in ("messages", "conversations")
        expected = f"none with preset {self.preset!r}, whose assistant turns are the responses"
        fix = "remove it (query_field names the field of the turns)"
        require(not is_chat or self.response_field is None, "task.response_field", expected, self.response_field, fix)
        fix = "set it to 0.05, for example"
        require_number("task.validation_fraction", self.validation_fraction, "[0, 1)", fix)

    @classmethod
    def from_rows(cls, train: object, *, validation: object = None, test: object = None, **options: object) -> Self:
        """Create a task from data sets in memory: Hugging Face's, torch's, or lists, whose items are mappings.

        Args:
            train: The training rows.
            validation: The validation rows.
            test: The test rows.
            options: Further options of the class.

        Examples:
            >>> rows = [{"prompt": "2+3", "completion": "5"}, {"prompt": "1+1", "completion": "2"}]
            >>> task = InstructionFiles.from_rows(rows, validation_fraction=0.5)
            >>> [len(task.examples(split)) for split in ("train", "validation")]
            [1, 1]
        """
        given: dict[str, Any] = {"train": train, "validation": validation, "test": test, **options}
        return cls(**given)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples. Files are read once."""
        is_test = split == "test"
        if is_test and self._sources("test") is None:
            split = "validation"
        if split == "test" or self._sources("validation") is not None:
            rows = self._read_split(split)
        else:
            pairs = zip(self._read_split("train"), self._is_held_out, strict=True)
            rows = [row for row, is_held_out in pairs if is_held_out == (split == "validation")]
        return [example for row in rows for example in (row[-1:] if is_test else row)]

    def describe_test_split(self) -> str:
        """Return whether the test examples are a separate split or the validation examples."""
        if self._sources("test") is not None:
            return "test split"
        held_out = " held out of the training files" if self._sources("validation") is None else ""
        return f"validation examples{held_out}"

    def describe_source(self, split: Split) -> tuple[str, str]:
        """Return the name of the option for a split's source, and a description of the source.

        Args:
            split: The split. Without validation files, validation samples come from the training files.
        """
        if split == "test" and self._sources("test") is None:
            split = "validation"
        if split == "validation" and self._sources("validation") is None:
            split = "train"
        sources = self._sources(split) or []
        names = [source if isinstance(source, str) else f"a {type(source).__name__}" for source in sources]
        return f"data.task.{split}", ", ".join(names)

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference apart from surrounding white space, else 0."""
        return float(response.strip() == example.response.strip())

    def _sources(self, split: Split) -> list[Any] | None:
        """Return a split's sources: files, data sets, or splits of the hub data set. ``None`` if it has no source."""
        files: Any = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if files is None:
            return [split] if self.dataset is not None and split in self.hub_splits else None
        are_files = isinstance(files, list) and all(isinstance(file, str) for file in files)
        return files if are_files and files else [files]

    def read_source(self, source: Any) -> Iterator[DataRow]:  # noqa: ANN401 - a name, or any data set
        """Return the rows in a file, in a hub data set's split, or in a data set in memory.

        Raises:
            ValueError: If the source cannot be read; the message names it.
        """
        return super().read_source(source) if isinstance(source, str) else rows_in(source)

    @cached_property
    def _is_held_out(self) -> list[bool]:
        """Return which training rows are held out: the rows with the lowest hashes. Equal rows stay together."""
        rows = self._read_split("train")
        keys = [uniform_scalar("validation", row[-1].query, row[-1].response) for row in rows]
        if self.validation_fraction == 0 or len(rows) < 2:
            return [False] * len(rows)
        count = min(max(1, round(self.validation_fraction * len(rows))), len(rows) - 1)
        ordered = sorted(keys)
        limit = ordered[count - 1]
        if limit == ordered[-1]:  # too many equal rows: nothing is left to train on
            limit = max((key for key in keys if key < limit), default=-1.0)
        return [key <= limit for key in keys]

    def _read_split(self, split: Split) -> list[list[Example]]:
        """Return every row's examples in a split."""
        if split not in self._samples:
            sources = self._sources(split)
            if sources is None:
                raise ValueError(f"task.{split}: expected files, got none; set task.{split}.")
            named = zip(sources, _unique_labels(sources, f"task.{split}"), strict=True)
            rows = ((row, label) for source, label in named for row in self.read_source(source))
            samples: list[list[Example]] = []
            num_skipped = num_left_out = 0
            places: dict[str, str] = {}
            self.num_context_turns[split] = 0
            for row, label in rows:
                try:
                    if split == "train" and not self._is_kept(row):
                        num_left_out += 1
                        continue
                    examples = self._examples(nans_to_nulls(row), _read_id(row) or f"{split}:{label}:{row.line}", split)
                    for example in examples:
                        place = places.setdefault(example.id, row.location)
                        expected = f"a unique id, not the id of {place}"
                        fix = "make it unique, or rename the field"
                        require(place == row.location, row.location, expected, example.id, fix)
                    samples.append(examples)
                except ValueError:
                    if self.malformed == "error":
                        raise
                    num_skipped += 1
            self.num_malformed[split], self.num_left_out[split] = num_skipped, num_left_out
            self._samples[split] = samples
        return self._samples[split]

    def _is_kept(self, row: DataRow) -> bool:
        """Return whether ``keep`` selects a row."""
        if self.keep == "all":
            return True
        fix = "let refusion-lit generate or predict write the answers, or set data.task.keep: all"
        is_finished = row.text("finish_reason", fix) == "eos" and bool(row.text("response").strip())
        if self.keep == "finished" or not is_finished:
            return is_finished
        score = row.require_values().get("score")
        fix = "let refusion-lit score write it, or set data.task.keep: finished"
        require(isinstance(score, (int, float)), row.location, "a number in field 'score'", score, fix)
        return score == 1

    def _examples(self, row: DataRow, identity: str, split: Split) -> list[Example]:
        """Return a row's examples: one, or an example for every assistant turn of a chat."""
        values = row.require_values("fix the line, or set malformed: skip in the task")
        preset = self._detect(row) if self.preset == "auto" else self.preset
        if preset in ("messages", "conversations"):
            name = self.query_field or preset
            turns = read_turns(row, name)
            return self._from_turns(row, identity, name, turns, split)
        query_field, response_field = _FIELDS[preset]
        query_field, response_field = self.query_field or query_field, self.response_field or response_field
        if isinstance(values.get(query_field), list) and isinstance(values.get(response_field), list):
            first, last = read_turns(row, query_field), read_turns(row, response_field, begins=False)
            return self._from_turns(row, identity, response_field, [*first, *last], split, start=len(first))
        query = row.text(query_field, _FIX_FIELDS)
        response = row.text(response_field, _FIX_FIELDS)
        if preset == "instruction" and values.get("input") is not None:
            query = "\n\n".join(filter(str.strip, (query, row.text("input"))))
        fix = "remove it, or set malformed: skip in the task"
        require(bool(response.strip()), row.location, "a response that is not empty", response, fix)
        messages = read_earlier_turns(row, query, has_history=preset == "instruction")
        meta = {"tools": tools} if (tools := read_tools(row)) else {}
        return [Example(id=identity, query=query, response=response, messages=messages, meta=meta)]

    def _detect(self, row: DataRow) -> str:
        """Return the preset whose fields a row has; ``query_response`` if there is none.

        Raises:
            ValueError: If a row has several presets' fields.
        """
        values = row.require_values()
        if self.query_field is not None or self.response_field is not None:
            return "query_response"
        presets = [name for name, names in _FIELDS.items() if {*names} <= values.keys()]
        # A table has the columns of all its rows.
        filled = [name for name in presets if not any(values[field] in (None, "", []) for field in _FIELDS[name])]
        presets = filled or presets[:1]
        fix = "set data.task.preset to one of them"
        require(len(presets) < 2, row.location, "the fields of one preset", ", ".join(presets), fix)
        return presets[0] if presets else "query_response"

    def _from_turns(
        self, row: DataRow, identity: str, name: str, turns: list[dict[str, Any]], split: Split, start: int = 1
    ) -> list[Example]:
        """Return an example for each assistant turn that can be trained, or for the last one.

        Args:
            row: The row.
            identity: The row's id. The last example gets it.
            name: The field with the turns.
            turns: The turns.
            split: The split.
            start: The first turn that may be trained.
        """
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i >= max(start, 1)]
        if not answers:
            roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
            raise ValueError(
                f"{row.location}: expected an assistant turn after another turn, got turns of {roles}; add one to "
                f"{name!r}, or rename its role to assistant."
            )
        last = answers[-1]
        if self.assistant_turns == "last":
            answers = [last]
        for i in answers:
            for mark in TRAINING_MARKS:
                where = f"{row.location}: turn {i + 1} (assistant) of {name!r}"
                weight = turns[i].get(mark)
                fix = "correct or remove the row"
                require(weight in (None, 0, 1), where, f"a {mark} of 0 or 1, or none", weight, fix)
        trained = [i for i in answers if not is_context(turns[i]) and has_parts(turns[i])]
        parts = {i: [part for part in MORE_THAN_TEXT if turns[i].get(part)] for i in trained}
        if self.assistant_parts == "text":
            where, fix = f"{row.location}: {name}", "set data.task.assistant_parts: all, or correct or remove the row"
            expected = f"text without {', '.join(parts.get(last, ()))} in turn {last + 1} (assistant)"
            require(not parts.get(last), where, expected, turns[last], fix)
            self.num_context_turns[split] += sum(bool(parts[i]) for i in trained)
            trained = [i for i in trained if not parts[i]]
        is_trained = bool(trained) and (last in trained or is_context(turns[last]))
        expected = f"text or tool calls, and a weight of 1 or none, in turn {last + 1} (assistant)"
        require(is_trained, f"{row.location}: {name}", expected, turns[last], "correct or remove the row")
        for turn in turns[: trained[-1] + 1]:
            row.check_unicode(name, json.dumps(turn, ensure_ascii=False))
        meta = {"tools": tools} if (tools := read_tools(row)) else {}
        return [
            Example(
                id=identity if i == trained[-1] else f"{identity}#turn{i + 1}",
                query=turns[i - 1].get("content") or "",
                response=turns[i].get("content") or "",
                messages=tuple(turns[:i]),
                meta=meta,
                answer=turns[i] if parts[i] else None,
            )
            for i in trained
        ]


def _read_id(row: DataRow) -> str | None:
    """Return a row's id; ``None`` unless it is text or an integer."""
    value = (row.values or {}).get("id")
    return row.check_unicode("id", str(value)) if type(value) in (str, int) else None


def _unique_labels(sources: list[Any], option: str) -> list[str]:
    """Return short labels of the sources for ids: file names, or paths if file names repeat."""
    files = [source for source in sources if isinstance(source, str)]
    if len({Path(file).resolve() for file in files}) < len(files):
        raise ValueError(f"{option}: expected each file once, got {sources}; remove the repetitions.")
    names = [Path(source).name if isinstance(source, str) else type(source).__name__ for source in sources]
    return names if len(set(names)) == len(names) else [str(source) for source in sources]
