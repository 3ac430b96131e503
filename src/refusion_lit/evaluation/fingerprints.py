"""What predictions depend on: prompts, decoder, sampling and model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

from refusion_lit.decoding import Decoder
from refusion_lit.modeling.weights import weights_digest
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
from refusion_lit.utils.fingerprint import Fingerprint, prompts_fingerprint


def predictions_fingerprint(
    model: TextModel,
    decoder: Decoder,
    sampling: SamplingParams,
    prompts: Iterable[tuple[str, object]],
) -> Fingerprint:
    """Return what a decoder's predictions depend on.

    Args:
        model: The model.
        decoder: The decoder.
        sampling: How much to generate and how tokens are drawn.
        prompts: Id and content of each prompt.
    """
    backbone = model.backbone
    verifier = model.verifier if "verifier" in decoder.requirements().predictions else None
    return {
        "prompts": prompts_fingerprint(prompts),
        "decoder": described(decoder),
        "sampling": asdict(sampling),
        "weights": weights_digest(backbone),
        **({} if verifier is None else {"verifier": weights_digest(verifier)}),
        "dtype": str(next(backbone.parameters()).dtype).removeprefix("torch."),
        "traits": backbone.traits.to_dict(),
    }


def described(part: object) -> dict[str, Any]:
    """Return the class of a decoder or task and its options."""
    options = asdict(part) if is_dataclass(part) and not isinstance(part, type) else {}
    return {"class": type(part).__name__, **options}
