"""Options of decoding in test, predict and logged samples."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.utils.require import require_at_least


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How decoders are run while a model is evaluated.

    Attributes:
        max_batch_size: Maximum number of prompts decoded concurrently; a finished prompt frees its row for the next
            one (continuous batching). Changes no token.
        max_tokens_per_forward: Maximum number of positions, padding included, that one call of the model computes;
            prompts that do not fit wait. ``null``: no limit. Changes no token.
        max_cache_tokens: Maximum number of cache entries (tokens of prompts and answers) of all prompts in flight; long
            prompts then run apart, fewer at a time. ``null``: no limit. Changes no token.
        share_prefixes: Compute what prompts of a batch have in common at their beginning once. Changes no token.
        allow_mismatch: Run decoders that the model was not trained for; tables mark them.
        record_forwards: Add ``forward_shapes`` to predictions.
        verifier: Path or hub id of an autoregressive model with the same tokenizer, for the decoder ``APD``.
        num_logged_samples: Number of validation samples that are decoded and logged as text after each validation.
    """

    max_batch_size: int = 64
    max_tokens_per_forward: int | None = None
    max_cache_tokens: int | None = None
    share_prefixes: bool = True
    allow_mismatch: bool = False
    record_forwards: bool = False
    verifier: str | None = None
    num_logged_samples: int = 4

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("model.decoding.max_batch_size", self.max_batch_size, 1)
        if self.max_tokens_per_forward is not None:
            require_at_least("model.decoding.max_tokens_per_forward", self.max_tokens_per_forward, 1)
        if self.max_cache_tokens is not None:
            require_at_least("model.decoding.max_cache_tokens", self.max_cache_tokens, 1)
        require_at_least("model.decoding.num_logged_samples", self.num_logged_samples, 0)
