"""``refusion-lit generate``: answer a prompt, or a file of prompts, with a model."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from refusion_lit.cli.decoding_progress import DecodingProgress
from refusion_lit.cli.model_options import ModelParser, Setup, add_decoding_options, add_model_options, load_setup
from refusion_lit.constraints.templates import Template, candidates
from refusion_lit.decoding import Generation, GenerationCallback, RowState, TextStream, check_prompts
from refusion_lit.evaluation.predictions import (
    PredictionsFile,
    as_line,
    check_writable,
    prediction,
    predictions_fingerprint,
)
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.errors import NothingToDoError
from refusion_lit.utils.files import decode_text, read_text
from refusion_lit.utils.require import require
from refusion_lit.utils.rows import DataRow, parse_json_lines

_SECONDS_BETWEEN_WRITES = 1.0


def build_parser() -> ModelParser:
    """Return the parser of ``generate``."""
    parser = ModelParser(prog="refusion-lit generate", description="Answer prompts.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, Hugging Face directory or hub id")
    parser.add_argument("--prompt", type=str, default=None, help="one prompt; its answer is printed as it grows")
    prompts = "file with one prompt per line, or JSONL; - for standard input"
    parser.add_argument("--prompts", type=str, default=None, help=prompts)
    parser.add_argument("--output", type=str, default=None, help="file for JSON lines; standard output by default")
    template = "file with fixed text of the response and spans such as {{5}} or {{1-6}} tokens to fill in"
    parser.add_argument("--template", type=str, default=None, help=template)
    parser.add_argument("--json_schema", type=str, default=None, help="file with a JSON schema that answers satisfy")
    add_model_options(parser)
    add_decoding_options(parser)
    parser.add_argument("--resume", type=bool, default=False, help="skip the prompts whose answers are in --output")
    parser.add_argument("--overwrite", type=bool, default=False, help="replace --output if it exists")
    return parser


def run(args: list[str]) -> int:
    """Print the answer to ``--prompt`` as it grows; with ``--prompts`` or ``--output``, write answers as JSON lines.

    Raises:
        ValueError: If an option, a prompt or the model is wrong, or the output cannot be written.
    """
    options = build_parser().parse(args)
    for name in ("resume", "overwrite"):
        require(bool(options.output or not options[name]), name, "--output, the file of answers", None, "give --output")
    if (options.prompt is None) == (options.prompts is None):
        got = "neither" if options.prompt is None else "both"
        raise ValueError(f"prompt: expected exactly one of --prompt and --prompts, got {got}; give one of them.")
    if options.prompt == "":
        raise ValueError("prompt: expected some text, got an empty prompt; give it some text.")
    if options.prompts is None and options.output is None:
        _print_answer(options)
    else:
        _write_answers(options)
    return 0


def _print_answer(options: Namespace) -> None:
    templates = None if options.template is None else [read_template(options.template)]
    schema = _read_schema(options.json_schema)
    setup = load_setup(options, {"0": options.prompt})
    setup.model.generate(
        [options.prompt],
        decoder=setup.decoder,
        sampling=setup.sampling,
        templates=templates,
        json_schema=schema,
        callbacks=[AnswerStream(setup.model.detokenize, setup.sampling, type(setup.decoder).__name__)],
        **vars(setup.decoding),
    )


class AnswerStream(GenerationCallback):
    """Prints a response's final prefix as it grows.

    Args:
        detokenize: Turns a response's tokens into text; see :meth:`TextModel.detokenize`.
        sampling: The response's length limit and stop strings.
        decoder: The decoder's name.
    """

    def __init__(self, detokenize: Callable[..., str], sampling: SamplingParams, decoder: str) -> None:
        self._detokenize = detokenize
        self._sampling = sampling
        self._stream: TextStream | None = None
        self._decoder = decoder

    def on_commit(self, index: int, state: RowState) -> None:  # noqa: ARG002
        """Print the text that has become final."""
        if self._stream is None:
            options = {"after": state.prompt.token_ids, "stop": self._sampling.stop, "is_growing": True}
            detokenize = partial(self._detokenize, **options)
            self._stream = TextStream(detokenize, self._sampling)
        print(self._stream.piece(state.final_prefix()), end="", flush=True)

    def on_finished(self, index: int, output: Generation) -> None:  # noqa: ARG002
        """Print the rest of the text, and on standard error the decoder's figures."""
        print(output.text if self._stream is None else self._stream.rest(output.text), flush=True)
        figures = f"{output.num_tokens} tokens, {output.num_forwards} forwards, {output.seconds:.2f} s"
        sys.stderr.write(f"{self._decoder}: {figures}, {output.finish_reason}\n")


def _write_answers(options: Namespace) -> None:
    """Answer all prompts and write JSON lines. All options and prompts are checked before the output is emptied."""
    _check_output(options)
    requests = _read_requests(options)
    schema = _read_schema(options.json_schema)
    setup = load_setup(options, {request.id: request.prompt for request in requests})
    model, decoder, token_ids = setup.model, type(setup.decoder).__name__, setup.token_ids
    _check_requests(requests, schema, setup)
    rules = {request.id: request.template or schema for request in requests}
    contents = {name: (tokens, rules[name]) if rules[name] else tokens for name, tokens in token_ids.items()}
    fingerprint = predictions_fingerprint(model, setup.decoder, setup.sampling, contents.items())
    progress = DecodingProgress()
    with ExitStack() as at_end:  # the callbacks run in reverse order
        file = None
        if options.output is not None:
            file = PredictionsFile(Path(options.output), fingerprint, resume=options.resume)
            at_end.callback(file.close)
        waiting = [request for request in requests if file is None or request.id not in file.done]
        if not waiting:
            raise NothingToDoError(f"{options.output} is complete; there is nothing left to do")
        writer = AnswerWriter(file, waiting, decoder)
        at_end.callback(writer.flush)
        at_end.callback(progress.stop)
        bar = [] if file is None else [progress.watch(decoder, len(requests), len(requests) - len(waiting))]
        start = time.monotonic()
        rows = model.generate_ids(
            [token_ids[request.id] for request in waiting],
            decoder=setup.decoder,
            sampling=setup.sampling,
            ids=[request.id for request in waiting],
            templates=[request.template for request in waiting],
            json_schema=schema,
            callbacks=[writer, *bar],
            continues_text=True,
            checked=True,
            **vars(setup.decoding),
        )
        speed = f"{sum(row.num_tokens for row in rows) / (time.monotonic() - start):,.0f} tokens/s"
    sys.stderr.write(f"{decoder}: {len(rows)} answers{'' if file is None else f', {speed}, {options.output}'}\n")


@dataclass(frozen=True)
class PromptRequest:
    """A prompt of a file.

    Attributes:
        id: The prompt's name in the output.
        prompt: Its text.
        reference: Reference answer, which is copied to the output.
        template: The response template.
    """

    id: str
    prompt: str
    reference: str | None = None
    template: str | None = None


def _read_requests(options: Namespace) -> list[PromptRequest]:
    """Read the prompts that the options name.

    Raises:
        ValueError: If a prompt is missing, empty or malformed, or two prompts have the same id.
    """
    template = None if options.template is None else read_template(options.template)
    if options.prompts is None:
        return [PromptRequest("0", options.prompt, template=template)]
    requests = list(read_prompts(options.prompts, template))
    fix = "write one prompt per line"
    require(bool(requests), "prompts", "at least one prompt", f"an empty file {options.prompts}", fix)
    for request in requests:
        if not request.prompt:
            raise ValueError(f"prompt {request.id}: expected some text, got an empty prompt; fill it in or remove it.")
    (name, count), *_ = Counter(request.id for request in requests).most_common(1)
    require(count == 1, "prompts", "each id once", f"{name} {count} times", "give the prompts different ids")
    return requests


def _check_requests(requests: list[PromptRequest], schema: Any, setup: Setup) -> None:  # noqa: ANN401 - any JSON value
    """Check that model and decoder can answer all prompts.

    Raises:
        ValueError: If the decoder does not fit the model, or a prompt does not fit the context.
    """
    model = setup.model
    model.check_decoder(setup.decoder, allow_mismatch=setup.decoding.allow_mismatch)
    prompts = [
        prompt
        for request in requests
        for prompt in candidates(
            Prompt(token_ids=tuple(setup.token_ids[request.id]), id=request.id), request.template, model.tokenizer
        )
    ]
    if schema is not None:
        prompts = model.schemas.constrain(prompts, schema, setup.decoder, setup.sampling)
    decoding_model = model.model_for(setup.decoder)
    check_prompts(decoding_model, setup.decoder, prompts, setup.sampling, setup.decoding.max_cache_tokens)


def _check_output(options: Namespace) -> None:
    """Refuse an output file that cannot be written or would lose its content. No model is loaded yet.

    Raises:
        ValueError: If the file cannot be written, or holds other data than predictions of this package.
    """
    if options.output is None:
        return
    require(options.output != "", "output", "a file's name", "", "give one, or leave --output out")
    output = Path(options.output)
    check_writable(output, overwrite=options.overwrite, source=options.prompts)
    is_free = options.resume or options.overwrite or not output.exists()
    fix = "add --resume to keep them and answer what is missing, or --overwrite to replace them"
    require(is_free, "output", "a new file", f"{output}, which holds answers", fix)


class AnswerWriter(GenerationCallback):
    """Writes finished responses as JSON lines: at once to standard output, or once a second to a file.

    Each write to the file is synced to disk.

    Args:
        file: The file; ``None`` for standard output.
        requests: The prompts, in the order of the decoder's indices.
        decoder: The decoder's name.
    """

    def __init__(self, file: PredictionsFile | None, requests: list[PromptRequest], decoder: str) -> None:
        self._file = file
        self._requests = requests
        self._decoder = decoder
        self._lines: list[dict[str, Any]] = []
        self._last_write = time.monotonic()

    def on_finished(self, index: int, generation: Generation) -> None:
        """Write a response."""
        request = self._requests[index]
        line = prediction(generation, decoder=self._decoder, prompt=request.prompt, reference=request.reference)
        self._lines.append(line)
        if self._file is None or time.monotonic() - self._last_write >= _SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        """Write the responses that are not written yet."""
        lines, self._lines = self._lines, []
        if self._file is None:
            print(*map(as_line, lines), sep="", end="", flush=True)
        elif lines:
            self._file.write(lines)
        self._last_write = time.monotonic()


def read_template(path: str) -> str:
    """Read and check a response template.

    Raises:
        ValueError: If the file cannot be read, or the template is wrong.
    """
    text = read_text(path, "template").removesuffix("\n")
    Template.parse(text)
    return text


def _read_schema(path: str | None) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON schema; ``None`` without a path.

    Raises:
        ValueError: If the file cannot be read or is not JSON.
    """
    if path is None:
        return None
    try:
        return json.loads(read_text(path, "json_schema"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}: {error.msg}"
        raise ValueError(f"json_schema: {path} is not JSON ({place}); write a JSON object into the file.") from error


def read_prompts(source: str, template: str | None = None) -> Iterator[PromptRequest]:
    """Read prompts from a file, or from standard input for ``-``.

    A plain line is one prompt. A JSON object has ``prompt``, and optionally ``id``, ``reference`` and ``template``.

    Args:
        source: Path of the file, or ``-``.
        template: Template for prompts without a template of their own.

    Raises:
        ValueError: If the file is missing or a line is malformed.
    """
    if source == "-":
        text = decode_text(sys.stdin.buffer.read(), "standard input", "prompts")
    else:
        text = read_text(source, "prompts")
    if source.endswith((".jsonl", ".json")) or text.split("\n", 1)[0].lstrip().startswith("{"):
        for row in parse_json_lines(source, text):
            yield _parse_request(row, template)
        return
    for number, line in enumerate(text.split("\n")):  # other line separators (U+2028, say) are characters of a prompt
        if line.strip():
            yield PromptRequest(str(number), line, template=template)


def _parse_request(row: DataRow, template: str | None) -> PromptRequest:
    """Return a JSON object's request.

    Raises:
        ValueError: Naming the line and its fault.
    """
    try:
        values = {name: value for name, value in row.require_values().items() if value is not None}
        template = row.text("template") if "template" in values else template
        reference = row.check_unicode("reference", str(values["reference"])) if "reference" in values else None
        name = row.check_unicode("id", str(values.get("id", row.line - 1)))
        return PromptRequest(name, row.text("prompt"), reference, template)
    except ValueError as error:
        raise ValueError(f"prompts: {error}") from error
