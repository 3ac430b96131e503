"""``refusion-lit generate``: answer prompts from a checkpoint, a Hugging Face directory or a hub id."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from refusion_lit.cli.parser import OneLineParser, add_decoding_options, add_model_options, setup_of
from refusion_lit.decoding import Generation, GenerationCallback, RowState, TextStream
from refusion_lit.types import SamplingParams
from refusion_lit.utils.require import require


def build_parser() -> OneLineParser:
    """Return the parser of ``generate``."""
    parser = OneLineParser(prog="refusion-lit generate", description="Answer prompts.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, Hugging Face directory or hub id")
    parser.add_argument("--prompt", type=str, default=None, help="one prompt; its answer is printed as it grows")
    prompts = "file with one prompt per line, or JSONL; - for standard input"
    parser.add_argument("--prompts", type=str, default=None, help=prompts)
    parser.add_argument("--output", type=str, default=None, help="file for JSON lines; standard output by default")
    template = "file with given text of the response and spans such as {{5}} or {{1-6}} tokens to fill in"
    parser.add_argument("--template", type=str, default=None, help=template)
    parser.add_argument("--json_schema", type=str, default=None, help="file with a JSON schema that every answer keeps")
    add_model_options(parser)
    add_decoding_options(parser)
    parser.add_argument("--resume", type=bool, default=False, help="skip the prompts whose answers are in --output")
    parser.add_argument("--overwrite", type=bool, default=False, help="replace --output if it exists")
    return parser


def run(args: list[str]) -> int:
    """Generate.

    Raises:
        ValueError: If an option, a prompt or the model is wrong.
    """
    options = build_parser().parse(args)
    for name in ("resume", "overwrite"):
        require(bool(options.output or not options[name]), name, "--output, the file of answers", None, "give --output")
    if (options.prompt is None) == (options.prompts is None):
        raise ValueError("prompt: expected exactly one of --prompt and --prompts; give one of them.")
    if options.prompts is not None or options.output is not None:
        from refusion_lit.cli.answers import write_answers

        write_answers(options)
        return 0
    if not options.prompt:
        raise ValueError("prompt: expected some text, got an empty prompt; give it some text.")
    rules: dict[str, Any] = {}
    if options.template is not None or options.json_schema is not None:
        from refusion_lit.cli.answers import schema_of, template_of

        templates = None if options.template is None else [template_of(options)]
        rules = {"templates": templates, "json_schema": schema_of(options)}
    setup = setup_of(options)
    setup.model.generate(
        [options.prompt],
        decoder=setup.decoder,
        sampling=setup.sampling,
        callbacks=[Stream(setup.model.detokenize, setup.sampling, type(setup.decoder).__name__)],
        **rules,
        **vars(setup.decoding),
    )
    return 0


class Stream(GenerationCallback):
    """Prints the final prefix of a response as it grows.

    Args:
        detokenize: Turns the tokens of a response into text; see :meth:`TextModel.detokenize`.
        sampling: What ends the response.
        decoder: The decoder's name.
    """

    def __init__(self, detokenize: Callable[..., str], sampling: SamplingParams, decoder: str) -> None:
        self._detokenize = detokenize
        self._sampling = sampling
        self._stream: TextStream | None = None
        self._decoder = decoder

    def on_commit(self, index: int, state: RowState) -> None:  # noqa: ARG002
        """Print what has become final."""
        if self._stream is None:
            detokenize = partial(self._detokenize, after=state.prompt.token_ids, stop=self._sampling.stop)
            self._stream = TextStream(detokenize, self._sampling)
        print(self._stream.piece(state.final_prefix()), end="", flush=True)

    def on_finished(self, index: int, output: Generation) -> None:  # noqa: ARG002
        """Print the rest, and which decoder took how many tokens and forwards."""
        print(output.text if self._stream is None else self._stream.rest(output.text), flush=True)
        figures = f"{output.num_tokens} tokens, {output.num_forwards} forwards, {output.seconds:.2f} s"
        sys.stderr.write(f"{self._decoder}: {figures}, {output.finish_reason}\n")
