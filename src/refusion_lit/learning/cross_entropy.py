"""Chunked cross-entropy: holds the logits of a few positions at a time.

The head of a large vocabulary dominates training memory: float32 logits of 4 x 4096 positions and 151 936 ids take
10 GB, and the loss holds several copies of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from refusion_lit.learning.batch import IGNORE_INDEX

LOGITS_BYTES = 64 * 2**20
"""Size limit for the float32 logits of one chunk."""

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
    teacher: Float[Tensor, "batch token hidden"] | None = None,
    chunk_size: int | None = None,
) -> Float[Tensor, " term"]:
    """Sum weighted cross-entropies by term; computes logits at labelled positions only.

    With a teacher, sums Kullback-Leibler divergences from its distributions instead.

    With gradients and more than one chunk, each chunk's logits are recomputed in the backward pass instead of kept.

    Args:
        hidden: Outputs of the backbone.
        head: The head; called with chunks of labelled hidden states.
        labels: Targets; ``IGNORE_INDEX`` where there is none.
        weights: Weight of each labelled position; other entries have no influence.
        terms: Term of each labelled position, in ``[0, num_terms)``.
        num_terms: Number of sums to return.
        teacher: Hidden states from which the head computes target distributions, without gradients. Labels then only
            say which positions count.
        chunk_size: Number of labelled positions in a chunk, at least 1; ``None``: the largest number that keeps the
            chunk's float32 logits below ``LOGITS_BYTES``.

    Returns:
        The sums in nats, in float32 (float64 for float64 logits); zero, with zero gradients, for a term without labels.
    """
    selected = (labels != IGNORE_INDEX).flatten().nonzero().squeeze(1)
    values = hidden.flatten(0, 1)[selected]
    factors, groups = (tensor.flatten()[selected] for tensor in (weights, terms))
    targets = labels.flatten()[selected] if teacher is None else teacher.detach().flatten(0, 1)[selected]

    def term_sums(losses: Tensor, groups: Tensor) -> Tensor:
        # A one-hot sum rather than index_add, whose order of additions differs from run to run on GPUs.
        return (F.one_hot(groups, num_terms).to(losses.dtype) * losses[:, None]).sum(0)

    size = chunk_size or default_chunk_size(values, head)

    def chunk_sums(values: Tensor, targets: Tensor, factors: Tensor, groups: Tensor) -> Tensor:
        logits = _at_least_float32(head(values))
        if teacher is None:
            return term_sums(F.cross_entropy(logits, targets, reduction="none") * factors, groups)
        with torch.no_grad():
            expected = _at_least_float32(head(targets)).log_softmax(-1)
        divergences = F.kl_div(logits.log_softmax(-1), expected, log_target=True, reduction="none").sum(-1)
        return term_sums(divergences * factors, groups)

    # Splitting an empty tensor gives one empty chunk: the loss then stays attached to the weights, as DDP needs.
    chunks = list(zip(*(tensor.split(size) for tensor in (values, targets, factors, groups)), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        return torch.stack([chunk_sums(*chunk) for chunk in chunks]).sum(0)
    sums = [checkpoint(chunk_sums, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum(0)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def default_chunk_size(values: Tensor, head: Head) -> int:
    """Return how many positions' float32 logits stay below ``LOGITS_BYTES``."""
    with torch.no_grad():
        vocab_size = head(values[:0]).shape[-1]
    return max(1, LOGITS_BYTES // (4 * vocab_size))
