"""The interface of a language model, implemented by real backbones and by the fakes of tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.types import ModelTraits, SpecialTokens


class LanguageModel(ABC):
    """A transformer body and a linear head; separate calls allow computing logits at the requested positions only.

    Attributes:
        traits: What the model was trained to do.
        special_tokens: Its special ids.
        max_positions: Length of its context; ``None`` if it has no limit.
        learns_positions: Whether no position beyond its context can be computed, as with learnt position embeddings.
    """

    traits: ModelTraits
    special_tokens: SpecialTokens
    max_positions: int | None = None
    learns_positions: bool = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: AttentionMask | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Run the body.

        Args:
            input_ids: Tokens in sequence order.
            position_ids: Position of each token in the final text; need not be monotonic.
            attention_mask: The keys that tokens see. Keys are the tokens or, with a cache, the cache's entries, to
                which the tokens are written first. Without a cache, it may also be ranges without spans, or ``None``
                for causal attention over the sequence.
            cache: A cache after :meth:`KVCache.prepare`.
        """
        return self.runner()(input_ids, position_ids, attention_mask, cache)

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:
        """Apply the head; the caller may modify the result in place."""
        return self.head_runner()(hidden)

    @abstractmethod
    def runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Return a function like :meth:`hidden_states` for many calls of an unchanged model."""

    @abstractmethod
    def head_runner(self) -> Callable[..., Float[Tensor, "*shape vocab"]]:
        """Return a function like :meth:`logits` for many calls of an unchanged model."""

    def draft_runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]] | None:
        """Return the forward of a drafter with layers of its own, like :meth:`runner`; ``None`` without one."""
        return None

    @property
    def forward_cost(self) -> float:
        """Fixed cost of a forward pass in positions of a row: a / b for a cost of a + b * positions."""
        return 32.0

    @abstractmethod
    def make_cache(self, num_rows: int) -> KVCache:
        """Return an empty cache with ``num_rows`` rows."""
