"""What the layers above need of a language model; real backbones and test fakes implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import ModelTraits, SpecialTokens


class LanguageModel(ABC):
    """A transformer body and a linear head, called separately so that logits exist only where they are read."""

    traits: ModelTraits
    special_tokens: SpecialTokens

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @abstractmethod
    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: Bool[Tensor, "batch token key"] | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Run the body.

        Args:
            input_ids: Tokens in sequence order.
            position_ids: Place of each token in the final text; need not be monotonic.
            attention_mask: ``True`` where a query may see a key. Keys are the tokens themselves or, with a
                cache, its entries (into which these tokens are written first). ``None``, only without a
                cache: plain causal attention over the sequence.
            cache: A cache that has been told where to write (:meth:`KVCache.prepare`).
        """

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:
        """Apply the head; the caller may change the result in place."""

    @abstractmethod
    def make_cache(self, num_rows: int) -> KVCache | None:
        """Return an empty cache for so many rows; ``None`` if the model keeps no state (test fakes)."""
