"""The predictions file: one JSON object per line, an interface for other programs.

Beside ``NAME.jsonl`` lies ``NAME.jsonl.meta.json`` with the predictions' fingerprint and, until they are complete, the
progress to resume from.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from numbers import Real
from pathlib import Path
from typing import Any, TextIO

from refusion_lit.decoding import Decoder, Generation
from refusion_lit.modeling.weights import weights_digest
from refusion_lit.tasks.base import Example, Task
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
from refusion_lit.utils.errors import NothingToDoError
from refusion_lit.utils.files import (
    Fingerprint,
    acquire_lock,
    atomic_writer,
    check_fingerprint,
    meta_path,
    prompts_fingerprint,
    read_fingerprint,
    read_object,
    release_lock,
    require_free,
    write_atomically,
    write_json_atomically,
)
from refusion_lit.utils.require import is_number, require
from refusion_lit.utils.rows import parse_json_lines, read_text


def predictions_fingerprint(
    model: TextModel,
    decoder: Decoder,
    sampling: SamplingParams,
    prompts: Iterable[tuple[str, object]],
) -> Fingerprint:
    """Return what a decoder's predictions depend on.

    Args:
        model: The model.
        decoder: The decoder.
        sampling: How much to generate and how tokens are drawn.
        prompts: Id and content of each prompt.
    """
    backbone = model.backbone
    verifier = model.verifier if "verifier" in decoder.requirements().predictions else None
    return {
        "prompts": prompts_fingerprint(prompts),
        "decoder": described(decoder),
        "sampling": asdict(sampling),
        "weights": weights_digest(backbone),
        **({} if verifier is None else {"verifier": weights_digest(verifier)}),
        "dtype": str(next(backbone.parameters()).dtype).removeprefix("torch."),
        "traits": backbone.traits.to_dict(),
    }


def described(part: object) -> dict[str, Any]:
    """Return the class of a decoder or task and its options."""
    options = asdict(part) if is_dataclass(part) and not isinstance(part, type) else {}
    return {"class": type(part).__name__, **options}


def prediction(
    row: Generation,
    *,
    decoder: str,
    prompt: str,
    reference: str | None = None,
    score: float | None = None,
    metrics: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return one prediction, with the keys that ``docs/commands.md`` documents.

    Args:
        row: What the engine returned.
        decoder: Class name of the decoder.
        prompt: The query as it was given.
        reference: The right response, if known.
        score: The response's score in [0, 1], if there is a reference.
        metrics: The task's further metrics by name, if it has any.
    """
    return {
        "id": row.id,
        "prompt": prompt,
        "response": row.text,
        "response_ids": row.token_ids,
        "reference": reference,
        "score": score,
        **({"metrics": dict(metrics)} if metrics else {}),
        "decoder": decoder,
        "num_tokens": row.num_tokens,
        "num_forwards": row.num_forwards,
        "finish_reason": row.finish_reason,
        "seconds": round(row.seconds, 6),
    }


def score_of(task: Task, example: Example, response: str) -> tuple[float | None, dict[str, float]]:
    """Return a task's score of a response, and its further metrics by name; none where the score is ``None``.

    Raises:
        ValueError: If the score is neither a number from 0 to 1 nor ``None``, or the metrics are not finite numbers
            under the names in ``task.metrics``.
    """
    name = f"{type(task).__name__}.score"
    try:
        found = task.score(example, response)
    except Exception as error:
        error.add_note(f"{name} failed on example {example.id!r}, response {response[:200]!r}")
        raise
    fix = f"see what it returns for example {example.id!r}"
    figures: Mapping[str, Any] = found if isinstance(found, Mapping) else {"score": found}
    score = figures.get("score")
    holds = score is None or isinstance(score, bool) or (is_number(score, Real) and 0 <= score <= 1)
    require(holds, name, "a number from 0 to 1, or None", score, fix)
    if found is None or (score is None and "score" in figures):
        return None, {}
    are_finite = all(isinstance(value, Real) and math.isfinite(value) for value in figures.values())
    fits = are_finite and figures.keys() == {"score", *task.metrics}
    expected = f"finite numbers by name: {', '.join(('score', *task.metrics))}"
    require(fits, name, expected, found, fix)
    return None if score is None else float(score), {key: float(figures[key]) for key in task.metrics}


def as_line(values: Mapping[str, Any]) -> str:
    """Return a prediction as one line of text."""
    return json.dumps(values, ensure_ascii=False) + "\n"


def check_writable(file: Path, *, overwrite: bool, source: str | Path | None = None) -> None:
    """Refuse to write predictions over a file that was not written as predictions, or under the name of a packed one.

    Args:
        file: The file to write.
        overwrite: Write over any file.
        source: A file that the command reads, if any.

    Raises:
        ValueError: If it holds something else or is a directory, or its directory does not exist.
    """
    require(file.suffix != ".gz", "output", "a name without .gz, as it is not compressed", str(file), "rename it")
    is_kind = overwrite or read_fingerprint(file) is not None
    require_free(file, "predictions of refusion-lit", is_kind=is_kind, source=source, fix="add --overwrite")


def read_json_lines(file: str | Path, option: str = "file", *, texts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, compressed (``.gz``) or not.

    Args:
        file: The file.
        option: The option that names it, for messages.
        texts: Keys that every object must have, with texts as values.

    Raises:
        ValueError: If the file cannot be read, or a line is not such an object; the message names file and line.
    """
    try:
        rows = list(parse_json_lines(str(file), read_text(Path(file))))
        for row in rows:
            for field in texts:
                row.text(field, fix="correct the line")
        return [dict(row.require_values()) for row in rows]
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


class PredictionsFile:
    """One process's share of a predictions file, which knows after every batch what an interrupted run has done.

    Args:
        path: The whole file, ``NAME.jsonl``.
        fingerprint: What its predictions depend on; a run is resumed only under the same.
        rank: This process's number.
        num_ranks: Number of processes; each writes ``NAME_rankN.jsonl`` until :meth:`merge`.
        resume: Keep the predictions that are there and add the missing ones.

    Attributes:
        path: This process's file.
        done: Ids of the prompts that are predicted.
        state: What was last given to :meth:`write`; ``None`` at the start.

    Raises:
        ValueError: If another process writes the file, it cannot be written, or there is nothing to resume, or the file
            was made for something else. What is there without ``resume`` is replaced; see :func:`check_writable`.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: Fingerprint,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        resume: bool = False,
    ) -> None:
        self._whole = path
        parts = [path.with_name(f"{path.stem}_rank{i}{path.suffix}") for i in range(num_ranks)]
        self._parts = parts if num_ranks > 1 else []
        self.path = self._parts[rank] if self._parts else path
        self._fingerprint = json.loads(json.dumps({**fingerprint, "num_processes": num_ranks}, default=str))
        # How many make this file complete; a share of several has no number of its own.
        self._num_prompts = 0 if self._parts else (self._fingerprint.get("prompts") or {}).get("num_prompts", 0)
        self.state: Any = None
        self.done: set[str] = set()
        try:
            place = self.path.with_name(f".{self.path.name}.lock")
            fix = "wait for it, or choose another file"
            self._lock = acquire_lock(place, "output", f"other process that writes {self.path}", fix)
            try:
                if resume:
                    self._resume()
                self._file = self._opened()
            except BaseException:
                release_lock(self._lock)
                raise
        except OSError as error:
            raise ValueError(
                f"output: expected a file that can be written, got {self.path} ({error.strerror}); choose another one."
            ) from error

    def write(self, lines: Iterable[Mapping[str, Any]], state: Any = None) -> None:  # noqa: ANN401 - JSON
        """Write a batch's predictions, then that they are done.

        Raises:
            ValueError: If they cannot be written (no space); the batches before stay done.
        """
        try:
            for values in lines:
                self._file.write(as_line(values))
                self.done.add(str(values["id"]))
            self._file.flush()
            os.fsync(self._file.fileno())  # the meta file must not reach the disk before the lines that it counts
            self.state = state
            self._write_meta()
        except OSError as error:
            raise ValueError(
                f"predictions: {self.path} cannot be written ({error.strerror}). Make room, then resume; the batches "
                "before this one are kept."
            ) from error

    def close(self) -> None:
        """Close the file; what is done stays known."""
        try:
            self._file.close()
        finally:
            release_lock(self._lock)

    def merge(self) -> None:
        """Join the shares of all processes in order, once all are done; for one process to call."""
        has_all = all(part.is_file() for part in self._parts)
        if not self._parts or not has_all:  # machines without a common directory keep their shares
            return
        with atomic_writer(self._whole) as file:
            for part in self._parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        for part in self._parts:
            part.unlink()
            meta_path(part).unlink(missing_ok=True)
        write_json_atomically(meta_path(self._whole), {"fingerprint": self._fingerprint})

    def complete(self) -> None:
        """Record that this process's file, unless merged into the whole one, is complete if it has all prompts."""
        if self.path.is_file() and len(self.done) >= self._num_prompts:
            write_json_atomically(meta_path(self.path), {"fingerprint": self._fingerprint})

    def _write_meta(self) -> None:
        progress = {"num_lines": len(self.done), "state": self.state}
        write_json_atomically(meta_path(self.path), {"fingerprint": self._fingerprint, "progress": progress})

    def _opened(self) -> TextIO:
        """Open the file, emptied if nothing is done."""
        if self.path.exists():
            self.path.open("a").close()  # a file that is refused keeps its meta file too
        self._write_meta()  # before it is emptied: a kill must not leave an empty file that counts as complete
        return self.path.open("a" if self.done else "w", encoding="utf-8")

    def _resume(self) -> None:
        """Take over the lines that are done."""
        other = "Give the options that it was made with, or start again without resume"
        if not self.path.is_file():
            if self._whole.is_file():
                meta = read_object(meta_path(self._whole))
                fix = "resume with as many processes as wrote it, or start again without resume"
                expected = f"complete predictions in {self._whole}"
                require("progress" not in meta, "resume", expected, "those of an interrupted run", fix)
                recorded = {**(meta.get("fingerprint") or {}), "num_processes": self._fingerprint["num_processes"]}
                check_fingerprint("resume", str(self._whole), recorded, self._fingerprint, fix=other)
                raise NothingToDoError(f"{self._whole} is complete; there is nothing left to do")
            shares = [*self._whole.parent.glob(f"{self._whole.stem}_rank*{self._whole.suffix}")]
            got = f"those of {len(shares)} processes in {self._whole.parent}"
            fix = "resume with as many processes as wrote them, or start again without resume"
            require(bool(self._parts) or not shares, "resume", "the predictions of one process", got, fix)
            return
        meta = read_object(meta_path(self.path))
        try:
            fingerprint = {key: meta["fingerprint"][key] for key in self._fingerprint}
            progress = meta.get("progress")
            lines = self.path.read_bytes().split(b"\n")
            lines = lines[: max(int(progress["num_lines"]), 0)] if progress else lines[:-1]  # without a torn last line
            self.state = progress["state"] if progress else None
            self.done = {str(json.loads(line)["id"]) for line in lines}
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"resume: expected the predictions of an interrupted run in {self.path}, and their fingerprint beside "
                "it, got something else; start again without resume, or choose another file."
            ) from error
        check_fingerprint("resume", str(self.path), fingerprint, self._fingerprint, fix=other)
        if progress is None:
            got = f"{self.path} with {len(self.done)}, which was complete"
            fix = "start again without resume, or choose another file"
            require(len(self.done) >= self._num_prompts, "resume", f"{self._num_prompts} answers", got, fix)
            raise NothingToDoError(f"{self.path} is complete; there is nothing left to do")
        write_atomically(self.path, b"".join(line + b"\n" for line in lines))
