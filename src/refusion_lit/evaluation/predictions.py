"""The predictions file: one JSON object a line, an interface that others build on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from refusion_lit.decoding import Generation
from refusion_lit.utils.files import atomic_writer, write_atomically, write_json_atomically

KEYS = ("id", "prompt", "response", "response_ids", "reference", "score", "num_tokens", "num_forwards",
        "forward_shapes", "seconds")  # fmt: skip


def prediction(
    row: Generation,
    *,
    prompt: str,
    response: str,
    reference: str | None,
    score: float | None,
    record_forwards: bool,
) -> dict[str, Any]:
    """Return one prediction with exactly the documented keys.

    Args:
        row: What the engine returned.
        prompt: The query as it was given.
        response: The text of the response.
        reference: The right response, if known.
        score: The response's score in [0, 1], if there is a reference.
        record_forwards: Whether to add ``forward_shapes``, pairs of rows and length of each forward.
    """
    values: dict[str, Any] = {
        "id": row.id,
        "prompt": prompt,
        "response": response,
        "response_ids": row.token_ids,
        "reference": reference,
        "score": score,
        "num_tokens": row.num_tokens,
        "num_forwards": row.num_forwards,
        "seconds": round(row.seconds, 6),
    }
    if record_forwards:
        values["forward_shapes"] = [list(shape) for shape in row.forward_shapes]
    return {key: values[key] for key in KEYS if key in values}


def write_line(file: TextIO, values: dict[str, Any]) -> None:
    """Write one prediction and flush, so that an interrupted run loses nothing."""
    file.write(json.dumps(values, ensure_ascii=False) + "\n")
    file.flush()


def write_lines(path: str | Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a whole predictions file."""
    with Path(path).open("w", encoding="utf-8") as file:
        for values in lines:
            write_line(file, values)


def finished_ids(path: str | Path) -> set[str]:
    """Return the ids in a predictions file, if it is there, and cut off a last line that was not finished.

    Raises:
        ValueError: If it is no predictions file.
    """
    file = Path(path)
    if not file.is_file():
        return set()
    whole, _, torn = file.read_bytes().rpartition(b"\n")  # a kill may cut a character in two
    try:
        ids = {str(json.loads(line)["id"]) for line in whole.split(b"\n") if line}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"output: expected a predictions file to go on with, got {path}; choose another one."
        ) from error
    if torn:
        os.truncate(file, file.stat().st_size - len(torn))
    return ids


class PredictionsFile:
    """One process's share of a predictions file, which remembers after every batch what an interrupted run has done.

    Beside it lies a hidden file with the number of lines that are done and what else the caller wants to find again.

    Args:
        directory: Where the file is written.
        name: Its name, without the ending.
        settings: What its predictions depend on, as JSON values; a run can only be taken up under the same.
        rank: This process's number.
        num_ranks: Number of processes.
        resume: Go on behind the predictions that are there.

    Attributes:
        done: Ids of the prompts that need no decoding any more.
        state: What was last given to :meth:`write`; ``None`` at the start.

    Raises:
        ValueError: If there is nothing to resume, or something else than asked for.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        settings: Mapping[str, Any],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        resume: bool = False,
    ) -> None:
        self._whole = directory / f"{name}.jsonl"
        self._parts = [directory / f"{name}_rank{i}.jsonl" for i in range(num_ranks)] if num_ranks > 1 else []
        self.path = self._parts[rank] if self._parts else self._whole
        self._progress = self.path.with_name(f".{self.path.stem}.progress.json")
        self._settings = json.loads(json.dumps({**settings, "num_processes": num_ranks}))
        self.state: Any = None
        self.done: set[str] = set()
        self._num_lines = 0
        if resume:
            self._take_up()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a" if self.done else "w", encoding="utf-8")

    def write(self, lines: Iterable[dict[str, Any]], state: Any = None) -> None:  # noqa: ANN401 - JSON
        """Write a batch's predictions, then that they are done.

        Raises:
            ValueError: If they cannot be written (no space); the batches before stay done.
        """
        try:
            for values in lines:
                write_line(self._file, values)
                self.done.add(str(values["id"]))
                self._num_lines += 1
            os.fsync(self._file.fileno())  # the progress must not reach the disk before the lines that it counts
            self.state = state
            progress = {"settings": self._settings, "num_lines": self._num_lines, "state": state}
            write_json_atomically(self._progress, progress)
        except OSError as error:
            raise ValueError(
                f"predictions: {self.path} cannot be written ({error.strerror}). Make room, then go on with "
                "--model.resume true and the run's --run_version; the batches before this one are kept."
            ) from error

    def close(self) -> None:
        """Close the file; what is done stays known."""
        self._file.close()

    def merge(self) -> None:
        """Join the shares of all processes in order, when all are done; for one process to call."""
        missing = [part.name for part in self._parts if not part.is_file()]
        if not self._parts or missing:  # machines without a common directory keep their shares
            return
        with atomic_writer(self._whole) as file:
            for part in self._parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        for part in self._parts:
            part.unlink()

    def clear(self) -> None:
        """Delete the record of progress, when the run is complete."""
        self._progress.unlink(missing_ok=True)

    def _take_up(self) -> None:
        if not (self._progress.is_file() and self.path.is_file()):
            if self._whole.is_file():
                raise ValueError(
                    f"resume: expected an unfinished run in {self._whole.parent}, got a finished {self._whole.name}; "
                    "there is nothing left to do. Without resume it is made anew."
                )
            return
        try:
            progress = json.loads(self._progress.read_bytes())
            settings, self.state, num_lines = dict(progress["settings"]), progress["state"], int(progress["num_lines"])
            lines = self.path.read_bytes().split(b"\n")[: max(num_lines, 0)]  # leaves out a torn last line
            self.done = {str(json.loads(line)["id"]) for line in lines}
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"resume: expected an unfinished run's predictions in {self.path} and its progress beside it, got "
                "something else; start anew without resume."
            ) from error
        if settings != self._settings:
            differing = sorted(
                key for key in {*settings, *self._settings} if settings.get(key) != self._settings.get(key)
            )
            raise ValueError(
                f"resume: expected the settings of the unfinished {self.path.name}, got others for "
                f"{', '.join(differing)}; set them as they were, or start anew without resume."
            )
        self._num_lines = len(lines)
        write_atomically(self.path, b"".join(line + b"\n" for line in lines))
