"""The parser of the commands without a Trainer, and the options of model, decoder and sampling that they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from jsonargparse import ArgumentParser, Namespace

import refusion_lit.decoding  # noqa: F401 - families register their checkpoint formats
from refusion_lit.cli.check import loaded
from refusion_lit.decoding import Decoder
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.types import SamplingParams
from refusion_lit.utils.require import require, require_at_least

if TYPE_CHECKING:
    from refusion_lit.api import TextModel


PARSER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""What a parser raises for wrong arguments; PyYAML's errors for numbers and dates that are none pass through it."""


class OneLineErrors:
    """Raises a parser's errors in one line: the option and the reason, without usage and dumps of types."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the error instead of printing it."""
        raise ValueError(brief(message)) from ex


def brief(message: str) -> str:
    """Return the option and the reason out of the paragraphs of a message of jsonargparse."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    start = lines.index("Errors:") + 1 if "Errors:" in lines else len(lines) - 1
    while lines[start].startswith("Does not validate against") and "Errors:" in lines[start:]:  # a union in a union
        start = lines.index("Errors:", start) + 1
    reason = " ".join(lines[start : start + (2 if lines[start].endswith(":") else 1)])
    is_option = start > 0 and lines[0].startswith("Parser key ")
    return f"{lines[0].removeprefix('Parser key ')} {reason}" if is_option else reason


class OneLineParser(OneLineErrors, ArgumentParser):
    """jsonargparse's parser, with help and errors of our own."""

    def parse(self, args: Sequence[str]) -> Namespace:
        """Parse arguments and create the components that they name.

        Raises:
            ValueError: Naming the wrong option, what was expected and what was got.
            SystemExit: After printing the help.
        """
        if any(arg == "-h" or arg.split("=")[0].endswith("help") for arg in args):
            from refusion_lit.cli.help import print_help_of

            print_help_of(self, args)
            raise SystemExit(0)
        args = self._joined(args)
        names = {arg.partition("=")[0] for arg in args}
        if any(name.startswith("--decoder.") for name in names) and "--decoder" not in names:
            # options without a class are those of the decoder for drafters, else ReFusion's
            args = [f"--decoder={'SelfSpeculative' if '--draft' in names else 'ReFusion'}", *args]
        try:
            parsed = self.parse_args(args)
        except PARSER_ERRORS as error:
            from refusion_lit.cli.check import explain

            raise explain(self, args, error) from error
        try:
            return cast("Namespace", self.instantiate_classes(parsed))
        except ValueError as error:
            raise ValueError(brief(str(error))) from error

    def _joined(self, args: Sequence[str]) -> list[str]:
        """Join options with values that start with a dash, such as a prompt ``-5+3``; argparse would refuse them."""
        known, joined = self._option_string_actions, list[str]()
        for arg in args:
            before = known.get(joined[-1]) if joined else None
            is_value = len(arg) > 1 and arg[0] == "-" != arg[1] and arg.partition("=")[0] not in known
            if is_value and before is not None and before.nargs is None:
                joined[-1] += f"={arg}"
            else:
                joined.append(arg)
        return joined


def as_list(value: str | list[str]) -> list[str]:
    """Return the values of an option that takes one or a list."""
    return [value] if isinstance(value, str) else value


def add_model_options(parser: OneLineParser, *, max_new_tokens: int = 128) -> None:
    """Add the options of model, decoder and sampling, named as in ``generate``."""
    add_decoder_option(parser)
    parser.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help="maximum length of a response")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus sampling, with a temperature above 0")
    parser.add_argument("--top_k", type=int | None, default=None, help="number of most probable tokens to sample from")
    stop = "string that ends a response; several as [A, B]"
    parser.add_argument("--stop", type=list[str] | str, default=[], help=stop)
    low = "end a response whose last 256 tokens have a lower entropy, in nats"
    parser.add_argument("--min_entropy", type=float | None, default=None, help=low)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    add_loading_options(parser)


def add_decoder_option(parser: OneLineParser) -> None:
    """Add the decoder with its options."""
    own = "by default the model's own, which is SelfSpeculative for one with a drafter"
    text = f"class of the decoder, or a YAML file like those in configs/decoder; {own}"
    # No class by default: jsonargparse would pass its options on to another class that has options of the same names.
    parser.add_argument("--decoder", type=Decoder | None, default=None, sub_configs=True, help=text)


def add_loading_options(parser: OneLineParser) -> None:
    """Add the options that say how ``--ckpt_path`` is loaded."""
    dtypes = Literal["float32", "float64", "bfloat16", "float16"]
    attention = Literal["causal", "bidirectional", "block_causal"] | None
    draft = "directory of a drafter for the model: its text in fewer forwards (see SelfSpeculative)"
    parser.add_argument("--draft", type=str | None, default=None, help=draft)
    verifier = "autoregressive model with the same tokenizer, for the decoder APD"
    parser.add_argument("--verifier", type=str | None, default=None, help=verifier)
    parser.add_argument("--dtype", type=dtypes, default="float32", help="type of the weights")
    parser.add_argument("--device", type=str, default="cpu", help="for example cpu or cuda:0")
    exact = "the same text alone and in a batch to the last bit, in every type; slower, on CPUs"
    parser.add_argument("--batch_invariant", type=bool, default=False, help=exact)
    layouts = "published layout of a directory whose config does not tell: " + ", ".join(FORMATS)
    parser.add_argument("--layout", type=str | None, default=None, help=layouts)
    text = "attention pattern of a directory that does not state its own"
    parser.add_argument("--attention", type=attention, default=None, help=text)
    parser.add_argument("--block_size", type=int | None, default=None, help="tokens a block, with block_causal")
    parser.add_argument("--allow_mismatch", type=bool, default=False, help="only warn if the model does not fit")
    parser.add_argument("--revision", type=str | None, default=None, help="pinned revision of a hub id")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run Python code that the source brings")


def sampling_of(options: Namespace) -> SamplingParams:
    """Return the sampling parameters, checked against the decoder.

    Raises:
        ValueError: If they are impossible.
    """
    for name in ("batch_size", "max_tokens_per_forward", "max_cache_tokens"):
        if options.get(name) is not None:
            require_at_least(name, options[name], 1)
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_entropy", "seed")
    stop = as_list(options.stop)
    is_list = len(stop) == 1 and isinstance(loaded(stop[0]), list)  # else it would have been taken as one
    require(not is_list, "stop", "a string or a list of strings", stop and stop[0], "quote numbers, as in '[\"2\"]'")
    sampling = SamplingParams(**{name: options[name] for name in names}, stop=tuple(stop))
    if options.decoder is not None:
        options.decoder.check(sampling)
    return sampling


def decoding_of(options: Namespace) -> dict[str, Any]:
    """Return the options of ``generate`` that say how prompts are decoded, after :func:`load_model_of`."""
    names = (
        "decoder", "batch_size", "max_tokens_per_forward", "max_cache_tokens", "share_prefixes", "allow_mismatch",
    )  # fmt: skip
    return {name: options[name] for name in names}


def load_model_of(options: Namespace) -> TextModel:
    """Load the model that the options name.

    Where no decoder is named, the model's own, fitted to ``max_new_tokens``, becomes ``options.decoder``.

    Raises:
        ValueError: If it cannot be loaded.
    """
    from refusion_lit.api import load
    from refusion_lit.modeling.loading import BackboneConfig

    if options.trust_remote_code:
        sys.stderr.write("trust_remote_code: Python code from the source will run on this machine.\n")
    names = ("dtype", "device", "revision", "trust_remote_code", "draft", "verifier")
    own = {name: options[name] for name in ("layout", "attention", "block_size", "batch_invariant")}
    overrides = BackboneConfig(source=options.ckpt_path, **own)
    model = load(options.ckpt_path, **{name: options[name] for name in names}, overrides=overrides)
    if "max_new_tokens" in options and options.decoder is None:
        options.decoder = model.default_decoder.fitted(sampling_of(options))
    return model
