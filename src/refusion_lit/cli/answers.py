"""Answers a file of prompts: what ``generate`` does with ``--prompts`` or ``--output``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from jsonargparse import Namespace

from refusion_lit.cli.parser import load_model_of, sampling_of
from refusion_lit.cli.progress import AnswerProgress
from refusion_lit.decoding import Generation, GenerationCallback
from refusion_lit.evaluation.predictions import finished_ids, is_predictions_file, prediction, write_line
from refusion_lit.utils.require import require


@dataclass(frozen=True)
class _Request:
    id: str
    prompt: str
    reference: str | None = None


def write_answers(options: Namespace) -> None:
    """Answer all prompts that the options name and write JSON lines.

    Raises:
        ValueError: If an option, a prompt or the model is wrong, or the file cannot be written.
    """
    requests = [_Request("0", options.prompt)] if options.prompts is None else list(read_prompts(options.prompts))
    if not requests:
        raise ValueError(f"prompts: expected at least one prompt, got an empty file {options.prompts}.")
    for request in requests:
        if not request.prompt:
            raise ValueError(f"prompt {request.id}: expected some text, got an empty prompt.")
    (name, count), *_ = Counter(request.id for request in requests).most_common(1)
    require(count == 1, "prompts", "each id once", f"{name!r} {count} times", "give each prompt an id of its own")
    done = _check_output(options)
    waiting = [request for request in requests if request.id not in done]
    sampling = sampling_of(options)
    if not waiting:
        sys.stderr.write(f"all {len(requests)} answers are in {options.output}; nothing is left to do\n")
        return
    model = load_model_of(options)
    progress = AnswerProgress()
    name = type(options.decoder).__name__
    watch = [progress.watch(name, len(requests), len(done))] if options.output else []
    with _opened(options.output, append=options.resume) as file:
        try:
            model.generate(
                [request.prompt for request in waiting],
                decoder=options.decoder,
                sampling=sampling,
                batch_size=options.batch_size,
                max_tokens_per_forward=options.max_tokens_per_forward,
                ids=[request.id for request in waiting],
                callbacks=[_Writer(file, waiting, record_forwards=options.record_forwards), *watch],
                allow_mismatch=options.allow_mismatch,
            )
        finally:
            progress.stop()
    if options.output:
        pace = progress.paces[name]
        sys.stderr.write(f"{pace.answers} answers, {pace.rate()}, {options.output}\n")


def _check_output(options: Namespace) -> set[str]:
    """Refuse to lose what is in the output file; return the ids of answers that are kept.

    Raises:
        ValueError: If the file cannot be written, or holds something other than predictions.
    """
    if options.output is None:
        require(not options.resume, "resume", "--output, whose answers are kept", None, "give --output")
        return set()
    output = Path(options.output)
    fix = "create the directory first"
    require(output.resolve().parent.is_dir(), "output", "a file in a directory that exists", str(output), fix)
    holds = options.prompts is None or output.resolve() != Path(options.prompts).resolve()
    require(holds, "output", "another file than --prompts", str(output), "choose another name")
    if options.resume:
        return finished_ids(output)
    if not options.overwrite and output.exists() and not is_predictions_file(output):
        raise ValueError(
            f"output: expected a new file or one with predictions, got {output}, which holds something else; choose "
            "another name, or add --overwrite."
        )
    return set()


@contextmanager
def _opened(path: str | None, *, append: bool) -> Iterator[TextIO]:
    """Open the output, standard output without a path; a failed write names the file."""
    if path is None:
        yield sys.stdout
        return
    try:
        with Path(path).open("a" if append else "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ValueError(
            f"output: {path} cannot be written ({error.strerror or error}); the answers before are kept, and --resume "
            "adds the others."
        ) from error


class _Writer(GenerationCallback):
    """Writes each response as it finishes."""

    def __init__(self, file: TextIO, requests: list[_Request], *, record_forwards: bool) -> None:
        self._file, self._requests, self._record_forwards = file, requests, record_forwards

    def on_finished(self, index: int, generation: Generation) -> None:
        request = self._requests[index]
        line = prediction(
            generation,
            prompt=request.prompt,
            response=generation.text,
            reference=request.reference,
            score=None,
            record_forwards=self._record_forwards,
        )
        write_line(self._file, line)


def read_prompts(source: str) -> Iterator[_Request]:
    """Read prompts: a plain line is one prompt; a JSON object needs ``prompt``, may have ``id`` and ``reference``.

    Raises:
        ValueError: If the file is missing or a line is malformed.
    """
    if source == "-":
        text = sys.stdin.read()
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"prompts: expected a file, got {source}, which is none; check the path.")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts: {source} is not UTF-8 text ({error.reason}); convert it.") from error
    lines = text.split("\n")  # other line separators (U+2028, say) are characters of a prompt
    is_json = source.endswith((".jsonl", ".json")) or (bool(lines) and lines[0].lstrip().startswith("{"))
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        yield _from_json(line, f"{source}:{number}", str(number - 1)) if is_json else _Request(str(number - 1), line)


def _from_json(line: str, where: str, default_id: str) -> _Request:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"prompts: {where} is not JSON ({getattr(error, 'msg', error)}).") from error
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise ValueError(f"prompts: {where}: expected an object with a text field 'prompt', got {line[:80]!r}.")
    reference = values.get("reference")
    try:
        reference = None if reference is None else str(reference)
        request = _Request(str(values.get("id", default_id)), values["prompt"], reference)
        "".join((request.id, request.prompt, reference or "")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompts: {where}: expected Unicode, got half a surrogate pair; correct the line.") from error
    return request
