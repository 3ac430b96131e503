"""Decodes one prompt and returns its trace, for ``chat`` and ``trace``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from refusion_lit.decoding import Generation, GenerationCallback
from refusion_lit.traces import Trace, trace_of
from refusion_lit.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from refusion_lit.api import TextModel
    from refusion_lit.decoding.admission import KeptCache


def decode_with_trace(
    model: TextModel,
    prompt: str,
    token_ids: Sequence[int],
    options: Namespace,
    sampling: SamplingParams,
    *,
    name: str = "0",
    callbacks: Sequence[GenerationCallback] = (),
    kept: KeptCache | None = None,
) -> tuple[Generation, Trace]:
    """Decode one prompt.

    Args:
        model: The model.
        prompt: The prompt's text, shown in the trace.
        token_ids: The encoded prompt.
        options: The command's options: decoder and whether a mismatch is allowed.
        sampling: Sampling parameters.
        name: Id of the prompt, which keys its sampling noise.
        callbacks: Notified as tokens are committed.
        kept: Keeps the cache for the next prompt.

    Raises:
        ValueError: If the prompt does not fit the model's context, or the model not the decoder.
    """
    output = model.decode(
        [Prompt(token_ids=tuple(token_ids), id=name)],
        options.decoder,
        sampling,
        callbacks=callbacks,
        allow_mismatch=options.allow_mismatch,
        trace=True,
        kept=kept,
    )
    row = output.rows[0]
    trace = trace_of(
        row,
        prompt=prompt,
        prompt_length=len(token_ids),
        decoder=type(options.decoder).__name__,
        slot_size=getattr(options.decoder, "slot_size", None) or 1,
        piece=piece_of(model),
    )
    return row, trace


def piece_of(model: TextModel) -> Callable[[int], str]:
    """Return a function that gives the text of a single token, special ones by name."""

    def piece(token: int) -> str:
        name = model.tokenizer.convert_ids_to_tokens(token)
        text = str(model.tokenizer.decode([token], skip_special_tokens=False))
        # Tokenizers that mark the beginning of a word drop the space from a text's first token.
        return f" {text}" if isinstance(name, str) and name.startswith("\u2581") and text[:1] != " " else text

    return piece
