"""The Python interface: load a model as a :class:`TextModel`, which decodes text or token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from refusion_lit.checkpoints.models import load_model
from refusion_lit.modeling.loading import BackboneConfig, DType, default_device
from refusion_lit.text_model import TextModel
from refusion_lit.utils.errors import reason_of
from refusion_lit.utils.require import require, require_choice


def load(
    source: str | Path,
    *,
    dtype: DType | torch.dtype | Literal["auto"] = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: BackboneConfig | None = None,
    draft: str | Path | None = None,
    verifier: str | Path | None = None,
) -> TextModel:
    """Load a model from a checkpoint, a Hugging Face directory or a hub id.

    Args:
        source: Path or hub id.
        dtype: Type of the weights. ``auto``: that of the checkpoint, but float32 on a CPU that has no instructions for
            a 16-bit type.
        device: Device of the weights. ``auto``: a GPU that CUDA finds, else the CPU.
        revision: Pinned revision of a hub id.
        trust_remote_code: Let the source run Python code of its own on this machine.
        overrides: Attention pattern and implementation, for directories that do not state theirs.
        draft: Directory of a drafter for the model, for :class:`~refusion_lit.decoding.SelfSpeculative`.
        verifier: Path or hub id of an autoregressive model with the same tokenizer, for
            :class:`~refusion_lit.decoding.APD`.

    Raises:
        ValueError: If it cannot be loaded.
    """
    fix = "give a path or a hub id"
    require(isinstance(source, str | Path), "source", "a checkpoint, a directory or a hub id", source, fix)
    dtype = cast("DType", str(dtype).removeprefix("torch."))
    require_choice("dtype", dtype, ("auto", *get_args(DType)))
    device = _device(device)
    where: dict[str, Any] = {"dtype": dtype, "device": device}
    code: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    backbone, tokenizer, template = load_model(source, **where, **code, overrides=overrides, draft=draft)
    backbone.to(device)
    model = TextModel(backbone.eval(), tokenizer, template)
    if verifier is not None:
        try:
            other = load(verifier, **where, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ValueError(f"verifier: {str(error).removeprefix('ckpt_path: ')}") from error
        model.pair_with(other)
    return model


def _device(name: str | torch.device) -> torch.device:
    """Return the device of a name, having made sure that this machine has it."""
    expected = "one that this machine has"
    fix = "use cpu, or auto"
    require(str(name).partition(":")[0] != "meta", "device", "one that computes", str(name), "use cpu or cuda")
    try:
        device = torch.device(default_device() if name == "auto" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device that is missing
        raise ValueError(f"device: expected {expected}, got {str(name)!r} ({reason_of(error)}); {fix}.") from error
    return device
