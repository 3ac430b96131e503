"""``refusion-lit generate``: answer prompts from a checkpoint, a Hugging Face directory or a hub id."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jsonargparse import Namespace

from refusion_lit.cli.parser import OneLineParser
from refusion_lit.cli.session import add_model_options, load_model_of, sampling_of
from refusion_lit.decoding import Generation, GenerationCallback, RowState
from refusion_lit.evaluation.predictions import finished_ids


@dataclass(frozen=True)
class _Request:
    id: str
    prompt: str
    reference: str | None = None


def build_parser() -> OneLineParser:
    """Return the parser of ``generate``."""
    parser = OneLineParser(prog="refusion-lit generate", description="Answer prompts.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, Hugging Face directory or hub id")
    parser.add_argument("--prompt", type=str, default=None, help="one prompt; its answer is printed as it grows")
    prompts = "file with a prompt a line, or JSONL; - for standard input"
    parser.add_argument("--prompts", type=str, default=None, help=prompts)
    output = "where to write JSON lines; standard output by default"
    parser.add_argument("--output", type=str, default=None, help=output)
    add_model_options(parser)
    parser.add_argument("--batch_size", type=int, default=16, help="prompts that share a forward; changes no token")
    budget = "positions a forward at most, padding included; changes no token"
    parser.add_argument("--max_tokens_per_forward", type=int | None, default=None, help=budget)
    parser.add_argument("--resume", type=bool, default=False, help="skip the prompts whose ids are in --output")
    parser.add_argument("--record_forwards", type=bool, default=False, help="add forward_shapes to the JSON lines")
    return parser


def run(args: list[str]) -> int:
    """Generate.

    Raises:
        ValueError: If an option, a prompt or the model is wrong.
    """
    parser = build_parser()
    parsed = parser.parse_args(args)
    options = cast("Namespace", parser.instantiate_classes(parsed))
    if (options.prompt is None) == (options.prompts is None):
        raise ValueError("prompt: expected exactly one of --prompt and --prompts; give one of them.")
    requests = [_Request("0", options.prompt)] if options.prompts is None else list(read_prompts(options.prompts))
    if not requests:
        raise ValueError(f"prompts: expected at least one prompt, got an empty file {options.prompts}.")
    for request in requests:
        if not request.prompt:
            raise ValueError(f"prompt {request.id}: expected some text, got an empty prompt.")
    if options.resume:
        if options.output is None:
            raise ValueError("resume: expected --output, whose answers are not made again; give it.")
        done = finished_ids(options.output)
        requests = [request for request in requests if request.id not in done]
    if requests:
        _generate(options, requests)
    return 0


def _generate(options: Namespace, requests: list[_Request]) -> None:
    from refusion_lit.evaluation.predictions import prediction, write_line

    sampling = sampling_of(options)
    model = load_model_of(options)
    interactive = options.prompts is None and options.output is None
    mode = "a" if options.resume else "w"
    output = Path(options.output).open(mode, encoding="utf-8") if options.output else sys.stdout  # noqa: SIM115

    class _Writer(GenerationCallback):
        def on_finished(self, index: int, output_row: Generation) -> None:
            request = requests[index]
            line = prediction(
                output_row,
                prompt=request.prompt,
                response=output_row.text,
                reference=request.reference,
                score=None,
                record_forwards=options.record_forwards,
            )
            write_line(output, line)

    watcher = _Stream(model.detokenize, sampling.stop) if interactive else _Writer()
    try:
        model.generate(
            [request.prompt for request in requests],
            decoder=options.decoder,
            sampling=sampling,
            batch_size=options.batch_size,
            max_tokens_per_forward=options.max_tokens_per_forward,
            ids=[request.id for request in requests],
            callbacks=[watcher],
            allow_mismatch=options.allow_mismatch,
        )
    finally:
        if output is not sys.stdout:
            output.close()


class _Stream(GenerationCallback):
    """Prints the longest final left part of a text as it grows."""

    def __init__(self, detokenize: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        self._detokenize, self._stop = detokenize, stop
        self._printed = ""

    def on_commit(self, index: int, state: RowState) -> None:  # noqa: ARG002
        text = self._text(state.final_prefix())
        # What may turn out to be the beginning of a stop string waits.
        waits = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._show(text[: len(text) - waits])

    def on_finished(self, index: int, output: Generation) -> None:  # noqa: ARG002
        self._show(output.text)
        sys.stdout.write("\n")
        sys.stderr.write(
            f"{output.num_tokens} tokens, {output.num_forwards} forwards, {output.seconds:.2f} s, "
            f"{output.finish_reason}\n"
        )

    def _text(self, token_ids: list[int]) -> str:
        from refusion_lit.decoding import cut_at_stop

        return cut_at_stop(self._detokenize(token_ids), self._stop)

    def _show(self, text: str) -> None:
        stable = text.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character: its other bytes are still to come
        if stable.startswith(self._printed):
            sys.stdout.write(stable[len(self._printed) :])
            sys.stdout.flush()
            self._printed = stable


def read_prompts(source: str) -> Iterator[_Request]:
    """Read prompts: a plain line is one prompt; a JSON object needs ``prompt``, may have ``id`` and ``reference``."""
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
    lines = text.split("\n")  # what else may end a line (U+2028, say) is a character of a prompt like others
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
        raise ValueError(f"prompts: {where}: expected Unicode, got half a surrogate pair; mend the line.") from error
    return request
