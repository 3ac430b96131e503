"""Cross-entropy that never holds the logits of more than a few positions.

The head of a large vocabulary is where training memory goes: float32 logits of 4 x 4096 positions and
151 936 ids take 10 GB, and the loss holds several copies of them (spec 11, section 2, "the cost trap").
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from refusion_lit.objectives.batch import IGNORE_INDEX

LOGITS_BYTES = 64 * 2**20
"""Aim for the float32 logits of one chunk."""

Kernel = Literal["torch", "liger"]

_LIGER_SINCE = (0, 8, 5)
"""Older versions return wrong gradients, without a word, when losses have weights."""

Head = Callable[[Tensor], Tensor]
"""Maps hidden states ``[token, hidden]`` to logits ``[token, vocab]``."""


def chunked_cross_entropy(
    hidden: Float[Tensor, "batch token hidden"],
    head: Head,
    labels: Int[Tensor, "batch token"],
    weights: Float[Tensor, "batch token"],
    terms: Int[Tensor, "batch token"],
    *,
    num_terms: int,
    chunk_size: int | None = None,
    kernel: Kernel = "torch",
) -> Float[Tensor, " term"]:
    """Sum weighted cross-entropies by term, with logits at labelled positions only.

    With gradients and more than one chunk, each chunk's logits are computed a second time in the backward
    pass instead of being kept.

    Args:
        hidden: Outputs of the backbone.
        head: The head; called with chunks of labelled hidden states.
        labels: Targets; ``IGNORE_INDEX`` where there is none.
        weights: Weight of each labelled position; what it holds elsewhere has no influence.
        terms: Term of each labelled position, in ``[0, num_terms)``.
        num_terms: How many sums to return.
        chunk_size: Labelled positions a chunk, at least 1; ``None``: as many as keep the chunk's float32
            logits below ``LOGITS_BYTES``.
        kernel: What computes it where gradients are needed; see :func:`check_kernel`. Kernels other than torch's
            choose their own chunks.

    Returns:
        The sums in nats, in float32 (float64 for float64 logits); zero, with zero gradients, where a term
        has no labels.
    """
    selected = (labels != IGNORE_INDEX).flatten().nonzero().squeeze(1)
    values = hidden.flatten(0, 1)[selected]
    targets, factors, groups = (tensor.flatten()[selected] for tensor in (labels, weights, terms))

    def term_sums(losses: Tensor, groups: Tensor) -> Tensor:
        # A one-hot sum rather than index_add, whose order of additions differs from run to run on GPUs.
        return (F.one_hot(groups, num_terms).to(losses.dtype) * losses[:, None]).sum(0)

    if kernel == "liger" and torch.is_grad_enabled() and len(values):
        return term_sums(_liger_losses(values, head, targets) * factors, groups)
    size = chunk_size or _default_chunk_size(values, head)

    def chunk_sums(values: Tensor, targets: Tensor, factors: Tensor, groups: Tensor) -> Tensor:
        logits = head(values)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return term_sums(F.cross_entropy(logits, targets, reduction="none") * factors, groups)

    # Split of an empty tensor is one empty chunk: the loss then stays attached to the weights, as DDP needs.
    chunks = list(zip(*(tensor.split(size) for tensor in (values, targets, factors, groups)), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        return torch.stack([chunk_sums(*chunk) for chunk in chunks]).sum(0)
    sums = [checkpoint(chunk_sums, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum(0)


def _default_chunk_size(values: Tensor, head: Head) -> int:
    with torch.no_grad():
        vocab_size = head(values[:0]).shape[-1]
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Refuse a kernel that cannot run here.

    Raises:
        ValueError: If its package is missing or too old, or the device is no GPU.
    """
    if kernel == "torch":
        return
    needed = ".".join(map(str, _LIGER_SINCE))
    try:
        found = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or tuple(map(int, re.findall(r"\d+", found)[:3])) < _LIGER_SINCE:
        raise ValueError(
            f"objective.kernel: 'liger' needs liger-kernel {needed} or newer, got {found or 'none'}; install "
            "refusion-lit[liger], or set kernel to 'torch'."
        )
    if device.type == "cpu":
        raise ValueError("objective.kernel: 'liger' needs a GPU, got the device cpu; set kernel to 'torch'.")


def _liger_losses(values: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Return every target's cross-entropy, without logits in memory."""
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    assert isinstance(head, nn.Linear)
    fused = LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)
    return fused(head.weight, values, targets, head.bias)
