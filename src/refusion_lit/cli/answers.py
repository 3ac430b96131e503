"""Answers a file of prompts: what ``generate`` does with ``--prompts`` or ``--output``."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from refusion_lit.cli.parser import setup_of
from refusion_lit.cli.progress import AnswerProgress
from refusion_lit.data.templates import Template, candidates
from refusion_lit.decoding import Generation, GenerationCallback, check_prompts
from refusion_lit.evaluation.predictions import (
    PredictionsFile,
    as_line,
    check_writable,
    prediction,
    predictions_fingerprint,
)
from refusion_lit.types import Prompt
from refusion_lit.utils.errors import NothingToDoError
from refusion_lit.utils.files import decode_text, read_text
from refusion_lit.utils.require import require
from refusion_lit.utils.rows import DataRow, parse_json_lines

_SECONDS_BETWEEN_WRITES = 1.0


@dataclass(frozen=True)
class _Request:
    id: str
    prompt: str
    reference: str | None = None
    template: str | None = None


def write_answers(options: Namespace) -> None:
    """Answer all prompts that the options name and write JSON lines.

    Raises:
        ValueError: If an option, a prompt or the model is wrong, or the file cannot be written.
    """
    _check_output(options)
    requests = [_Request("0", options.prompt)] if options.prompts is None else list(read_prompts(options.prompts))
    fix = "write one on each line"
    require(bool(requests), "prompts", "at least one prompt", f"an empty file {options.prompts}", fix)
    for request in requests:
        if not request.prompt:
            raise ValueError(f"prompt {request.id}: expected some text, got an empty prompt; fill it in or remove it.")
    (name, count), *_ = Counter(request.id for request in requests).most_common(1)
    require(count == 1, "prompts", "each id once", f"{name} {count} times", "give each prompt an id of its own")
    template = template_of(options)
    templates = {request.id: template if request.template is None else request.template for request in requests}
    schema = schema_of(options)
    setup = setup_of(options)
    model = setup.model
    model.check_decoder(setup.decoder, allow_mismatch=setup.decoding.allow_mismatch)
    encoded = {request.id: model.encode(request.prompt) for request in requests}
    prompts = [
        each
        for name, tokens in encoded.items()
        for each in candidates(Prompt(token_ids=tuple(tokens), id=name), templates[name], model.tokenizer)
    ]
    if schema is not None:
        prompts = model.schemas.constrain(prompts, schema, setup.decoder, setup.sampling)
    # The prompts are checked before the output file is emptied.
    decoded_by = model.model_for(setup.decoder)
    check_prompts(decoded_by, setup.decoder, prompts, setup.sampling, setup.decoding.max_cache_tokens)
    extra = {name: templates[name] or schema for name in encoded}
    contents = {name: (tokens, extra[name]) if extra[name] else tokens for name, tokens in encoded.items()}
    fingerprint = predictions_fingerprint(model, setup.decoder, setup.sampling, contents.items())
    output = options.output
    file = None if output is None else PredictionsFile(Path(output), fingerprint, resume=options.resume)
    waiting = [request for request in requests if file is None or request.id not in file.done]
    if file is not None and not waiting:
        file.close()
        raise NothingToDoError(f"{output} is complete; there is nothing left to do")
    decoder = type(setup.decoder).__name__
    answers = _Answers(file, waiting, decoder)
    progress = AnswerProgress()
    watch = [] if file is None else [progress.watch(decoder, len(requests), len(requests) - len(waiting))]
    with ExitStack() as at_end:  # in reverse order
        if file is not None:
            at_end.callback(file.close)
        at_end.callback(answers.flush)
        at_end.callback(progress.stop)
        model.generate_ids(
            [encoded[request.id] for request in waiting],
            decoder=setup.decoder,
            sampling=setup.sampling,
            ids=[request.id for request in waiting],
            templates=[templates[request.id] for request in waiting],
            json_schema=schema,
            callbacks=[answers, *watch],
            continues_text=True,
            checked=True,
            **vars(setup.decoding),
        )
    about = f"{len(waiting)} answers"
    if file is not None:
        pace = progress.paces[decoder]
        about = f"{pace.answers} answers, {pace.rate()}, {options.output}"
    sys.stderr.write(f"{decoder}: {about}\n")


def template_of(options: Namespace) -> str | None:
    """Return the text of the template that the options name, if they name one.

    Raises:
        ValueError: If it cannot be read, or is wrong.
    """
    if options.template is None:
        return None
    text = read_text(options.template, "template").removesuffix("\n")
    Template.parse(text)
    return text


def schema_of(options: Namespace) -> Any:  # noqa: ANN401 - any JSON value
    """Return the JSON schema that the options name, if they name one.

    Raises:
        ValueError: If it cannot be read.
    """
    if options.json_schema is None:
        return None
    try:
        return json.loads(read_text(options.json_schema, "json_schema"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}: {error.msg}"
        raise ValueError(f"json_schema: {options.json_schema} is not JSON ({place}); write an object there.") from error


def _check_output(options: Namespace) -> None:
    """Refuse to lose what is in the output file, before the model is loaded.

    Raises:
        ValueError: If the file cannot be written, or holds something other than our predictions.
    """
    if options.output is None:
        return
    require(options.output != "", "output", "a file's name", "", "give one, or leave --output out")
    output = Path(options.output)
    check_writable(output, overwrite=options.overwrite, source=options.prompts)
    is_free = options.resume or options.overwrite or not output.exists()
    fix = "add --resume to keep them and answer what is missing, or --overwrite to replace them"
    require(is_free, "output", "a new file", f"{output}, which holds answers", fix)


class _Answers(GenerationCallback):
    """Writes each response as it finishes: to standard output, or those of a second together to a file.

    Each write to the file is synced to disk.
    """

    def __init__(self, file: PredictionsFile | None, requests: list[_Request], decoder: str) -> None:
        self._file = file
        self._requests = requests
        self._decoder = decoder
        self._lines: list[dict[str, Any]] = []
        self._written = time.monotonic()

    def on_finished(self, index: int, generation: Generation) -> None:
        request = self._requests[index]
        line = prediction(generation, decoder=self._decoder, prompt=request.prompt, reference=request.reference)
        self._lines.append(line)
        if self._file is None or time.monotonic() - self._written >= _SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        """Write what is left."""
        lines = self._lines
        self._lines = []
        if self._file is None:
            print(*map(as_line, lines), sep="", end="", flush=True)
        elif lines:
            self._file.write(lines)
        self._written = time.monotonic()


def read_prompts(source: str) -> Iterator[_Request]:
    """Read prompts: a plain line is one prompt; a JSON object needs ``prompt``, and may have other fields.

    These are ``id``, ``reference`` and ``template``, which stands for that of the option.

    Raises:
        ValueError: If the file is missing or a line is malformed.
    """
    if source == "-":
        text = decode_text(sys.stdin.buffer.read(), "standard input", "prompts")
    else:
        text = read_text(source, "prompts")
    if source.endswith((".jsonl", ".json")) or text.split("\n", 1)[0].lstrip().startswith("{"):
        yield from map(_from_row, parse_json_lines(source, text))
        return
    for number, line in enumerate(text.split("\n")):  # other line separators (U+2028, say) are characters of a prompt
        if line.strip():
            yield _Request(str(number), line)


def _from_row(row: DataRow) -> _Request:
    """Return the request of a JSON object.

    Raises:
        ValueError: Naming the line and what is wrong with it.
    """
    try:
        given = {name: value for name, value in row.require_values().items() if value is not None}
        template = row.text("template") if "template" in given else None
        reference = row.check_unicode("reference", str(given["reference"])) if "reference" in given else None
        name = row.check_unicode("id", str(given.get("id", row.line - 1)))
        return _Request(name, row.text("prompt"), reference, template)
    except ValueError as error:
        raise ValueError(f"prompts: {error}") from error
