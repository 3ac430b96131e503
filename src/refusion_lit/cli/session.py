"""Options and loading that the commands with one decode at a time share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from refusion_lit.cli.parser import OneLineParser
from refusion_lit.decoding import Decoder, ReFusion
from refusion_lit.types import SamplingParams

if TYPE_CHECKING:
    from refusion_lit.api import TextModel


def add_model_options(parser: OneLineParser, *, max_new_tokens: int = 128) -> None:
    """Add the options of model, decoder and sampling, named as in ``generate``."""
    add_decoder_option(parser)
    parser.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help="tokens a response at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus, with a temperature above 0")
    parser.add_argument("--top_k", type=int | None, default=None, help="most probable tokens kept, likewise")
    parser.add_argument("--stop", type=list[str], default=[], help="strings that end a response")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    add_loading_options(parser)


def add_decoder_option(parser: OneLineParser) -> None:
    """Add the decoder with its options."""
    parser.add_argument("--decoder", type=Decoder, default=ReFusion(), sub_configs=True,
                        help="class of the decoder, or a YAML file like those in configs/decoder")  # fmt: skip


def add_loading_options(parser: OneLineParser) -> None:
    """Add the options that say how ``--ckpt_path`` is loaded."""
    parser.add_argument("--dtype", type=Literal["float32", "float64", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", type=str, default="cpu", help="for example cpu or cuda:0")
    parser.add_argument("--attention", type=Literal["causal", "bidirectional", "block_causal"] | None, default=None,
                        help="attention pattern of a directory that does not name its own")  # fmt: skip
    parser.add_argument("--block_size", type=int | None, default=None, help="tokens a block, with block_causal")
    parser.add_argument("--allow_mismatch", type=bool, default=False, help="only warn where the model does not fit")
    parser.add_argument("--revision", type=str | None, default=None, help="pinned revision of a hub id")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="let the source run its own Python code")


def sampling_of(options: Namespace) -> SamplingParams:
    """Return the sampling parameters, checked against the decoder.

    Raises:
        ValueError: If they are impossible.
    """
    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=tuple(options.stop),
    )
    options.decoder.check(sampling)
    return sampling


def load_model_of(options: Namespace) -> TextModel:
    """Load the model that the options name.

    Raises:
        ValueError: If it cannot be loaded.
    """
    from refusion_lit.api import load
    from refusion_lit.modeling.loading import BackboneConfig

    if options.trust_remote_code:
        sys.stderr.write("trust_remote_code: Python code from the source will run on this machine.\n")
    return load(
        options.ckpt_path,
        dtype=options.dtype,
        device=options.device,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        overrides=BackboneConfig(source=options.ckpt_path, attention=options.attention, block_size=options.block_size),
    )


def piece_of(model: TextModel) -> Callable[[int], str]:
    """Return a function that gives the text of a single token, special ones by name."""

    def piece(token: int) -> str:
        name = model.tokenizer.convert_ids_to_tokens(token)
        text = str(model.tokenizer.decode([token], skip_special_tokens=False))
        # Tokenizers that mark a word's beginning drop it from a text's first token.
        return f" {text}" if isinstance(name, str) and name.startswith("\u2581") and text[:1] != " " else text

    return piece


def slot_size_of(decoder: Decoder) -> int:
    """Return how many tokens a decoder's slots have; 1 if it has none."""
    return int(getattr(decoder, "slot_size", 1))
