"""Checks of the arguments of Python calls: unknown options, and values of another type."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

from refusion_lit.engine.decoder import Decoder
from refusion_lit.engine.engine import decode
from refusion_lit.engine.output import GenerationCallback
from refusion_lit.types import SamplingParams
from refusion_lit.utils.require import require

_DECODE_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(decode).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("max_batch_size", "detokenize")
)
"""Options of ``decode`` that callers pass on; the two others are theirs to set."""


def check_options(method: str, given: Iterable[str], own: Sequence[str]) -> None:
    """Refuse unknown keyword arguments of a method that passes them on to :func:`~refusion_lit.decoding.decode`.

    Args:
        method: Its name.
        given: Names of the arguments.
        own: Options of the method besides ``batch_size`` and those of ``decode``.

    Raises:
        TypeError: Naming the options that there are.
    """
    options = [*own, "batch_size", *_DECODE_OPTIONS]
    for name in given:
        if name not in options:
            is_sampling = name in SamplingParams.__dataclass_fields__
            hint = f"; pass it as sampling=SamplingParams({name}=...)" if is_sampling else ""
            raise TypeError(f"{method}: unknown option {name}; expected one of {', '.join(options)}{hint}.")


def check_arguments(decoder: object, sampling: object, callbacks: object) -> None:
    """Refuse arguments of another type, such as a class in place of an instance.

    Raises:
        ValueError: Naming the argument.
    """
    fix = "create one, as in decoder=ReFusion()"
    require(isinstance(decoder, Decoder), "decoder", "an instance of a decoder class", decoder, fix)
    fix = "create one, as in sampling=SamplingParams(max_new_tokens=64)"
    require(isinstance(sampling, SamplingParams), "sampling", "an instance of SamplingParams", sampling, fix)
    holds = isinstance(callbacks, Sequence) and all(isinstance(each, GenerationCallback) for each in callbacks)
    fix = "derive a class from it, and put its instance in a list"
    require(holds, "callbacks", "a list of instances of GenerationCallback", callbacks, fix)
