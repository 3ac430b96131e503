"""``refusion-lit generate``: answer prompts from a checkpoint, a Hugging Face directory or a hub id."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from jsonargparse import Namespace

from refusion_lit.cli.parser import OneLineParser
from refusion_lit.decoding import Decoder, GenerationCallback, ReFusion, RowOutput, RowState


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
    parser.add_argument("--decoder", type=Decoder, default=ReFusion(), sub_configs=True,
                        help="class of the decoder, or a YAML file like those in configs/decoder")  # fmt: skip
    parser.add_argument("--max_new_tokens", type=int, default=128, help="tokens a response at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus, with a temperature above 0")
    parser.add_argument("--top_k", type=int | None, default=None, help="most probable tokens kept, likewise")
    parser.add_argument("--stop", type=list[str], default=[], help="strings that end a response")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    parser.add_argument("--batch_size", type=int, default=16, help="prompts that share a forward; changes no token")
    parser.add_argument(
        "--max_tokens_per_forward",
        type=int | None,
        default=None,
        help="bound on the positions, padding included, of a forward; changes no token",
    )
    parser.add_argument("--dtype", type=Literal["float32", "float64", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", type=str, default="cpu", help="for example cpu or cuda:0")
    parser.add_argument("--attention", type=Literal["causal", "bidirectional", "block_causal"] | None, default=None,
                        help="attention pattern of a directory that does not name its own")  # fmt: skip
    parser.add_argument("--block_size", type=int | None, default=None, help="tokens a block, with block_causal")
    parser.add_argument("--record_forwards", type=bool, default=False, help="add forward_shapes to the JSON lines")
    parser.add_argument("--allow_mismatch", type=bool, default=False, help="only warn where the model does not fit")
    parser.add_argument("--revision", type=str | None, default=None, help="pinned revision of a hub id")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="let the source run its own Python code")
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
    requests = [_Request("0", options.prompt)] if options.prompts is None else list(_read(options.prompts))
    if not requests:
        raise ValueError(f"prompts: expected at least one prompt, got an empty file {options.prompts}.")
    for request in requests:
        if not request.prompt:
            raise ValueError(f"prompt {request.id}: expected some text, got an empty prompt.")
    _generate(options, requests)
    return 0


def _generate(options: Namespace, requests: list[_Request]) -> None:
    from refusion_lit.api import cut_at_stop, load
    from refusion_lit.modeling.loading import BackboneConfig
    from refusion_lit.predictions import prediction, write_line
    from refusion_lit.types import SamplingParams

    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=tuple(options.stop),
    )
    options.decoder.check(sampling)
    if options.trust_remote_code:
        sys.stderr.write("trust_remote_code: Python code from the source will run on this machine.\n")
    overrides = BackboneConfig(source=options.ckpt_path, attention=options.attention, block_size=options.block_size)
    model = load(
        options.ckpt_path,
        dtype=options.dtype,
        device=options.device,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        overrides=overrides,
    )
    interactive = options.prompts is None and options.output is None
    output = Path(options.output).open("w", encoding="utf-8") if options.output else sys.stdout  # noqa: SIM115

    class _Writer(GenerationCallback):
        def on_finished(self, index: int, output_row: RowOutput) -> None:
            request = requests[index]
            text = cut_at_stop(model.detokenize(output_row.token_ids), sampling.stop)
            line = prediction(
                output_row,
                prompt=request.prompt,
                response=text,
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

    def on_finished(self, index: int, output: RowOutput) -> None:  # noqa: ARG002
        self._show(self._text(output.token_ids))
        sys.stdout.write("\n")
        sys.stderr.write(
            f"{output.num_tokens} tokens, {output.num_forwards} forwards, {output.seconds:.2f} s, "
            f"{output.finish_reason}\n"
        )

    def _text(self, token_ids: list[int]) -> str:
        from refusion_lit.api import cut_at_stop

        return cut_at_stop(self._detokenize(token_ids), self._stop)

    def _show(self, text: str) -> None:
        stable = text.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character: its other bytes are still to come
        if stable.startswith(self._printed):
            sys.stdout.write(stable[len(self._printed) :])
            sys.stdout.flush()
            self._printed = stable


def _read(source: str) -> Iterator[_Request]:
    """Read prompts: a plain line is one prompt; a JSON object needs ``prompt``, may have ``id`` and ``reference``."""
    if source == "-":
        lines = sys.stdin.read().splitlines()
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"prompts: expected a file, got {source}, which does not exist.")
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts: {source} is not UTF-8 text ({error.reason}); convert it.") from error
    is_json = source.endswith((".jsonl", ".json")) or (bool(lines) and lines[0].lstrip().startswith("{"))
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        yield _from_json(line, f"{source}:{number}", str(number - 1)) if is_json else _Request(str(number - 1), line)


def _from_json(line: str, where: str, default_id: str) -> _Request:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"prompts: {where} is not JSON ({error.msg}).") from error
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise ValueError(f"prompts: {where}: expected an object with a text field 'prompt', got {line[:80]!r}.")
    reference = values.get("reference")
    reference = None if reference is None else str(reference)
    return _Request(str(values.get("id", default_id)), values["prompt"], reference)
