"""Reads GGUF files of architectures that transformers knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from refusion_lit.modeling.stored_tensors import first_not_finite
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require


def load_gguf(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a GGUF file as an unquantised model with its tokenizer.

    Args:
        path: The file.

    Returns:
        The model in float32, without quantisation config, and the tokenizer with its chat template.

    Raises:
        ValueError: If the packages are missing, or the file is missing, damaged or of an unknown architecture.
    """
    file = Path(path)
    require(file.is_file(), "file", "a GGUF file", str(file), "check the path")
    with file.open("rb") as opened:
        is_gguf = opened.read(4) == b"GGUF"
    require(is_gguf, "file", "a GGUF file", f"{file}, which does not start as one", "check the download")
    try:
        import accelerate  # noqa: F401 - transformers' reader needs it
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "import-gguf: needs the packages gguf and accelerate; run pip install gguf accelerate."
        ) from error
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # the reader has errors for damaged files and unknown architectures
        raise ValueError(
            f"file: {file} cannot be read ({error_reason(error)}); it may be truncated, or of an architecture that "
            "transformers does not read from GGUF files."
        ) from error
    weight = first_not_finite(loaded.state_dict().items())
    got = f"NaN or an infinity in {weight}"
    require(weight is None, "file", f"finite weights in {file}", got, "fetch it again, or convert the model again")
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config  # it would be saved with the model
    with torch.device("meta"):
        model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model, tokenizer
