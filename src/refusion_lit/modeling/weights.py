"""The digest of a model's weights, which identifies a model."""

from __future__ import annotations

import hashlib

import torch


@torch.no_grad()
def weights_digest(model: torch.nn.Module) -> str | None:
    """Return a digest of a model's weights, 16 hexadecimal digits.

    It hashes names and shapes of all parameters and a sample of 64 values from each, which is fast for large models.
    The values are rounded to bfloat16, so that loading in float32 or bfloat16 gives the same digest.

    Args:
        model: A model; tied weights count once.

    Returns:
        The digest; ``None`` if this process does not hold all weights.
    """
    state = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if type(weight.data) is not torch.Tensor:  # sharded
            return None
        flat = weight.detach().flatten()
        count = min(len(flat), 64)
        # In integers: float32 has no room for the indices of a large embedding.
        index = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
        values = flat[index].to(torch.bfloat16).view(torch.int16).cpu().numpy()
        state.update(f"{name}{tuple(weight.shape)}".encode() + values.tobytes())
    return state.hexdigest()[:16]
