"""Model, decoder and sampling options that commands share, and how a command loads its model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jsonargparse import Namespace

from refusion_lit.cli.parser import OneLineParser, as_list

# Importing the decoders registers the checkpoint formats of all families.
from refusion_lit.decoding import Decoder, ReFusion, check_context
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.plugins import load_plugins
from refusion_lit.types import DecodingOptions, SamplingParams
from refusion_lit.utils.require import require

if TYPE_CHECKING:
    from refusion_lit.modeling.load import CheckPlan, ModelPlan
    from refusion_lit.text_model import TextModel

T = TypeVar("T")


class ModelParser(OneLineParser):
    """Parser of a command with a model and a decoder. Options of the decoder may stand before ``--decoder``."""

    def parse(self, args: Sequence[str]) -> Namespace:
        """Parse arguments. ``--decoder.NAME`` without ``--decoder`` changes the model's default decoder."""
        names = [arg.partition("=")[0] for arg in args]
        for name in ("--decoder.help", "--decoder"):
            if name in names:
                start = names.index(name)
                end = start + (1 if "=" in args[start] else 2)
                decoder, others = args[start:end], [*args[:start], *args[end:]]
                # jsonargparse knows the options of a decoder after --decoder only, and reads no options after the help.
                return super().parse([*decoder, *others] if name == "--decoder" else [*others, *decoder])
        if "--decoder.class_path" in names or not any(name.startswith("--decoder.") for name in names):
            return super().parse(args)
        decoder = _find_default_decoder(super().parse(_without_decoder(args)))
        default = json.dumps({"class_path": type(decoder).__name__, "init_args": vars(decoder)})
        return super().parse([f"--decoder={default}", *args])


def _without_decoder(args: Sequence[str]) -> list[str]:
    """Return arguments without ``--decoder.NAME VALUE`` and ``--decoder.NAME=VALUE``."""
    rest, expects_value = [], False
    for arg in args:
        is_option = arg.startswith("--decoder.")
        is_value = expects_value and not arg.startswith("--")
        if not (is_option or is_value):
            rest.append(arg)
        expects_value = is_option and "=" not in arg
    return rest


def _find_default_decoder(options: Namespace) -> Decoder:
    """Return the default decoder of a command's model, without loading weights.

    Raises:
        ValueError: If the model's config cannot be read, or names no decoder.
    """
    from refusion_lit.checkpoints.models import read_default_decoder

    if not options.get("ckpt_path"):
        return ReFusion()
    names = ("revision", "checkpoint_format", "attention", "block_size", "draft")
    values = {name: options[name] for name in names if options.get(name)}
    decoder = read_default_decoder(options["ckpt_path"], **values)
    if "max_new_tokens" in options:
        decoder = decoder.adapt_to(SamplingParams(max_new_tokens=options["max_new_tokens"]))
    return decoder


def add_model_options(parser: OneLineParser, *, max_new_tokens: int = 128, with_seed: bool = True) -> None:
    """Add model, decoder and sampling options, named as in ``generate``."""
    add_decoder_option(parser)
    parser.add_class_arguments(SamplingParams, skip={"stop", *(() if with_seed else ("seed",))})
    parser.set_defaults(max_new_tokens=max_new_tokens)
    stop = "string that ends a response; several as [A, B]"
    parser.add_argument("--stop", type=list[str] | str, default=[], help=stop)
    add_loading_options(parser)


def add_decoder_option(
    parser: OneLineParser, which: str = "by default the model's decoder: with a drafter, SelfSpeculative"
) -> None:
    """Add the decoder with its options."""
    load_plugins()  # decoders of plugins have short names
    text = f"class of the decoder, or a YAML file like the files in configs/decoder; {which}"
    # There is no default class: if another class were chosen, jsonargparse would give it options of the default class.
    parser.add_argument("--decoder", type=Decoder | None, default=None, sub_configs=True, help=text)


def add_decoding_options(parser: OneLineParser, *names: str) -> None:
    """Add the options for decoding prompts; by default all of them."""
    known = [field.name for field in fields(DecodingOptions)]
    left_out: set[str | int] = {name for name in known if names and name not in names}
    parser.add_class_arguments(DecodingOptions, skip=left_out)


def add_loading_options(parser: OneLineParser) -> None:
    """Add the options for loading ``--ckpt_path``."""
    dtypes = Literal["auto", "float32", "float64", "bfloat16", "float16"]
    attention = Literal["causal", "bidirectional", "block_causal"] | None
    draft = "directory of a drafter trained for this model; the same text in fewer forward passes (SelfSpeculative)"
    parser.add_argument("--draft", type=str | None, default=None, help=draft)
    verifier = "autoregressive model with the same tokenizer, for the decoder APD"
    parser.add_argument("--verifier", type=str | None, default=None, help=verifier)
    dtype = "type of the weights; auto: the checkpoint's type, but float32 on a CPU that lacks instructions for 16 bits"
    parser.add_argument("--dtype", type=dtypes, default="auto", help=dtype)
    device = "for example cpu or cuda:0; auto: a GPU that CUDA finds, else the CPU"
    parser.add_argument("--device", type=str, default="auto", help=device)
    exact = "compute the same bits for a prompt alone and in a batch, in every dtype; slower, and only on CPUs"
    parser.add_argument("--batch_invariant", type=bool, default=False, help=exact)
    formats = "checkpoint format, where config.json does not name it: " + ", ".join(sorted(FORMATS))
    parser.add_argument("--checkpoint_format", type=str | None, default=None, help=formats)
    text = "attention pattern, if the model directory does not state it"
    parser.add_argument("--attention", type=attention, default=None, help=text)
    parser.add_argument("--block_size", type=int | None, default=None, help="tokens per block, with block_causal")
    bos = "begin prompts with BOS: true, false, or auto, as the tokenizer does; by default as stored with the model"
    parser.add_argument("--add_bos", type=bool | Literal["auto"] | None, default=None, help=bos)
    chat = "options of the chat template, as '{\"enable_thinking\": false}'; by default as stored with the model"
    parser.add_argument("--chat_template_kwargs", type=dict[str, Any] | None, default=None, help=chat)
    parser.add_argument("--revision", type=str | None, default=None, help="pinned revision of a hub id")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run Python code that the source brings")


def build_sampling(options: Namespace) -> SamplingParams:
    """Return the sampling parameters, after a check that the decoder supports them.

    Raises:
        ValueError: If a parameter is out of range, or the decoder does not support it.
    """
    stop = options.stop
    # The parser leaves a list as text if an item is no string: [2] would become the stop string "[2]".
    is_unread_list = isinstance(stop, str) and stop.startswith("[") and stop.endswith("]")
    require(
        not is_unread_list, "stop", "a string or a list of strings", stop, "quote numbers and signs, as in '[\"2\"]'"
    )
    sampling = build_options(SamplingParams, options, stop=tuple(as_list(stop)))
    if options.decoder is not None:
        options.decoder.check(sampling)
    return sampling


def load_model(options: Namespace, check: CheckPlan | None = None) -> TextModel:
    """Load the model that a command's options name, and print its size.

    Args:
        options: The command's options.
        check: Called before weights are read; see :func:`refusion_lit.load`.

    Raises:
        ValueError: If the model cannot be loaded, the decoder needs a verifier, or a verifier is given that the decoder
            does not use.
    """
    from refusion_lit.checkpoints.models import load
    from refusion_lit.modeling.load import BackboneConfig
    from refusion_lit.modeling.vocabulary import describe_bos

    path, decoder = options.ckpt_path, options.decoder
    is_used = decoder is not None and "verifier" in decoder.requirements().predictions
    got = "the model's own" if decoder is None else type(decoder).__name__
    fix = "add --decoder APD, or leave it out"
    require(is_used or options.verifier is None, "verifier", "a decoder that uses a verifier, as APD does", got, fix)
    fix = "add --verifier with an autoregressive model that has the same tokenizer"
    require(not is_used or options.verifier is not None, "verifier", f"a second model for {got}", None, fix)
    names = ("checkpoint_format", "attention", "block_size", "batch_invariant")
    overrides = BackboneConfig(source=path, **{name: options[name] for name in names})
    names = ("dtype", "device", "revision", "trust_remote_code", "draft", "verifier", "add_bos", "chat_template_kwargs")
    model = load(path, overrides=overrides, check=check, **{name: options[name] for name in names})
    size = sum(weights.numel() for weights in model.backbone.parameters())
    number = f"{size / 1e6:.1f} million" if size >= 1e5 else f"{size / 1e3:.1f} thousand"
    kind = str(model.backbone.head.weight.dtype).removeprefix("torch.")
    bos = describe_bos(model.tokenizer)
    sys.stderr.write(f"{path}: {number} parameters, {kind} on {model.backbone.device}{', ' * bool(bos)}{bos}\n")
    return model


@dataclass(frozen=True)
class Setup:
    """The model, decoder and options of a command that decodes.

    Attributes:
        model: The loaded model.
        decoder: The decoder in the options, or the model's default decoder, fitted to the length limit.
        sampling: Length limit, sampling options and stop strings.
        decoding: How prompts are batched and decoded.
        token_ids: Token ids of the prompts known at the start, by prompt id.
    """

    model: TextModel
    decoder: Decoder
    sampling: SamplingParams
    decoding: DecodingOptions
    token_ids: dict[str, list[int]] = field(default_factory=dict)

    def check(self) -> None:
        """Check that the model fits the decoder and the length limit. Commands without prompts at the start call it.

        Raises:
            ValueError: If the model was not trained for the decoder, or its context is too short.
        """
        self.model.check_decoder(self.decoder, allow_mismatch=self.decoding.allow_mismatch)
        check_context(self.model.model_for(self.decoder), [(1, "0")], self.sampling.max_new_tokens, self.decoder)


def load_setup(options: Namespace, prompts: Mapping[str, str] | None = None) -> Setup:
    """Check sampling and decoding options, the decoder and the prompts' lengths, and load the model.

    Args:
        options: The command's options.
        prompts: Prompts by id, for commands that know them.

    Raises:
        ValueError: If an option is impossible, the model was not trained for the decoder, a prompt is too long, or the
            model cannot be loaded.
    """
    from refusion_lit.data.conversations import encode_prompt
    from refusion_lit.text_model import check_plan

    sampling = build_sampling(options)
    decoding = build_options(DecodingOptions, options)
    token_ids: dict[str, list[int]] = {}

    def check(plan: ModelPlan) -> None:
        for name, prompt in (prompts or {}).items():
            token_ids[name] = encode_prompt(plan.tokenizer, prompt, plan.prompt_template)
        lengths = [(len(tokens), name) for name, tokens in token_ids.items()] or [(1, "0")]
        check_plan(plan, options.decoder, lengths, sampling, allow_mismatch=decoding.allow_mismatch)

    model = load_model(options, check)
    decoder = options.decoder or model.default_decoder.adapt_to(sampling)
    return Setup(model, decoder, sampling, decoding, token_ids)


def build_options(kind: type[T], options: Namespace, **others: object) -> T:
    """Create a dataclass from options and other values. Fields without an option keep their defaults.

    Raises:
        ValueError: If an option is out of range.
    """
    names = [field.name for field in fields(kind) if field.name in options]  # type: ignore[arg-type] - a dataclass
    return kind(**{name: options[name] for name in names} | others)
