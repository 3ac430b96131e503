"""The predictions file: JSON Lines, an interface for other programs.

``NAME.jsonl.meta.json`` beside ``NAME.jsonl`` holds the predictions' fingerprint, and the progress from which an
interrupted run resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from refusion_lit.decoding import Decoder, Generation
from refusion_lit.modeling.weights import weights_digest
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
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
from refusion_lit.utils.require import require
from refusion_lit.utils.rows import parse_json_lines, read_data_text


def predictions_fingerprint(
    model: TextModel,
    decoder: Decoder,
    sampling: SamplingParams,
    prompts: Iterable[tuple[str, object]],
) -> Fingerprint:
    """Return everything that a decoder's predictions depend on.

    Args:
        model: The model.
        decoder: The decoder.
        sampling: Length limit and sampling options.
        prompts: Ids and contents.
    """
    backbone = model.backbone
    verifier = model.verifier if "verifier" in decoder.requirements().predictions else None
    return {
        "prompts": prompts_fingerprint(prompts),
        "decoder": class_and_options(decoder),
        "sampling": asdict(sampling),
        "weights": weights_digest(backbone),
        **({} if verifier is None else {"verifier": weights_digest(verifier)}),
        "dtype": str(next(backbone.parameters()).dtype).removeprefix("torch."),
        "traits": backbone.traits.to_dict(),
    }


def class_and_options(part: object) -> dict[str, Any]:
    """Return a decoder's or task's class name and options."""
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
    """Return a prediction, with the keys that ``docs/commands.md`` documents.

    Args:
        row: The engine's output.
        decoder: The decoder's class name.
        prompt: The query, before any template.
        reference: The right response, if known.
        score: The response's score in [0, 1], if known.
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


def as_line(values: Mapping[str, Any]) -> str:
    """Return a prediction as a line for a file."""
    return json.dumps(values, ensure_ascii=False) + "\n"


def check_writable(file: Path, *, overwrite: bool, source: str | Path | None = None) -> None:
    """Refuse a file with other contents than predictions, and names of compressed files.

    Args:
        file: The file to write.
        overwrite: Write over any file.
        source: A file that the command reads, if any.

    Raises:
        ValueError: If the file has other contents or is a directory, or its directory does not exist.
    """
    require(
        file.suffix != ".gz", "output", "a name without .gz, because the file is not compressed", str(file), "rename it"
    )
    is_kind = overwrite or read_fingerprint(file) is not None or _is_empty(file)
    require_free(file, "predictions of refusion-lit", is_kind=is_kind, source=source, fix="add --overwrite")


def _is_empty(file: Path) -> bool:
    """Return whether a file is empty, for instance because its process was killed at once."""
    return file.is_file() and file.stat().st_size == 0


def read_json_lines(file: str | Path, option: str = "file", *, texts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read objects from a JSON Lines file, compressed (``.gz``) or not.

    Args:
        file: The file.
        option: The option that names the file, for messages.
        texts: Keys that every object must have, with texts as values.

    Raises:
        ValueError: If the file cannot be read, or a line is no object with these keys; the message names the line.
    """
    try:
        rows = list(parse_json_lines(str(file), read_data_text(Path(file))))
        for row in rows:
            for field in texts:
                row.text(field, fix="correct the line")
        return [dict(row.require_values()) for row in rows]
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def write_predictions(file: Path, lines: Iterable[Mapping[str, Any]], fingerprint: Fingerprint) -> None:
    """Write a complete predictions file with its fingerprint.

    Raises:
        OSError: If a file cannot be written.
    """
    with atomic_writer(file) as output:
        output.write("".join(map(as_line, lines)).encode())
        output.flush()
        os.fsync(output.fileno())
        # Now the lines are on disk, and the file gets its name when the block ends. If the process is killed before it
        # writes the new fingerprint, the file must not have the old one.
        meta_path(file).unlink(missing_ok=True)
    write_json_atomically(meta_path(file), {"fingerprint": fingerprint})


class PredictionsFile:
    """An append-only file for predictions with different ids, which an interrupted run resumes.

    Args:
        path: The file.
        fingerprint: Fingerprint of everything that the predictions depend on. A run resumes only if it is equal.
        resume: Keep the predictions in the file. Without it, they are replaced; see :func:`check_writable`.

    Attributes:
        path: The file.
        done: All ids in the file.
        state: The last ``state`` given to :meth:`write`; ``None`` at the start.

    Raises:
        ValueError: If another process writes the file, it cannot be written, or it cannot be resumed.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint, *, resume: bool = False) -> None:
        self.path = path
        self.done: set[str] = set()
        self.state: Any = None
        self._fingerprint = json.loads(json.dumps(fingerprint, default=str))
        try:
            lock = path.with_name(f".{path.name}.lock")
            fix = "wait for it, or choose another file"
            self._lock = acquire_lock(lock, "output", f"other process that writes {path}", fix)
            try:
                is_new = not path.is_file() or (_is_empty(path) and not meta_path(path).exists())
                content = b"" if is_new or not resume else self._read()
                path.open("a").close()  # if the file cannot be written, the meta file must stay as it is
                self._write_meta()  # before the file is emptied, so that a kill never leaves a wrong number of lines
                write_atomically(path, content)
                self._file = path.open("a", encoding="utf-8")
            except BaseException:
                release_lock(self._lock)
                raise
        except OSError as error:
            raise ValueError(
                f"output: expected a file that can be written, got {path} ({error.strerror}); choose another one."
            ) from error

    def write(self, lines: Iterable[Mapping[str, Any]], state: Any = None) -> None:  # noqa: ANN401 - JSON
        """Append a batch's predictions, and store a state from which a resumed run continues.

        Raises:
            ValueError: If the batch cannot be written (no space). The batches before it are kept.
        """
        try:
            for line in lines:
                self._file.write(as_line(line))
                self.done.add(str(line["id"]))
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
        """Close the file and let other processes write it."""
        try:
            self._file.close()
        finally:
            release_lock(self._lock)

    def _write_meta(self) -> None:
        progress = {"num_lines": len(self.done), "state": self.state}
        write_json_atomically(meta_path(self.path), {"fingerprint": self._fingerprint, "progress": progress})

    def _read(self) -> bytes:
        """Read the lines that the meta file counts, and return them as bytes. A torn last batch is not counted."""
        meta = read_object(meta_path(self.path))
        try:
            fingerprint = {key: meta["fingerprint"][key] for key in self._fingerprint}
            num_lines, self.state = int(meta["progress"]["num_lines"]), meta["progress"]["state"]
            lines = self.path.read_bytes().split(b"\n")[: max(num_lines, 0)]
            self.done = {str(json.loads(line)["id"]) for line in lines}
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            num_lines, lines, fingerprint = 1, [], {}
        expected = f"the predictions of an interrupted run in {self.path}, and their fingerprint beside them"
        fix = "start again without resume, or choose another file"
        require(len(self.done) == num_lines, "resume", expected, "another file, or a file that was changed", fix)
        fix = "Give the options that it was made with, or start again without resume"
        check_fingerprint("resume", str(self.path), fingerprint, self._fingerprint, fix=fix)
        return b"".join(line + b"\n" for line in lines)
