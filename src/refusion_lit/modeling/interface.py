"""The interface of a language model, implemented by real backbones and by tests' fakes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.types import ModelTraits, SpecialTokens


class TextLimits:
    """How long a model's texts may be.

    Attributes:
        max_positions: Length of the context; ``None`` if it has no limit.
        window: Number of tokens seen by layers with a sliding window; ``None`` without such layers. It limits texts
            whose tokens are not computed in text order.
    """

    max_positions: int | None = None
    window: int | None = None

    def context(self, *, in_text_order: bool) -> int | None:
        """Return the maximum text length; ``None`` without a limit.

        Args:
            in_text_order: Whether tokens stand in the KV cache in the order of the text.
        """
        limits = (self.max_positions, None if in_text_order else self.window)
        return min((limit for limit in limits if limit is not None), default=None)


class LanguageModel(TextLimits, ABC):
    """A transformer body and a linear head. They are called separately, so that logits are computed only where needed.

    Attributes:
        traits: What the model was trained to do.
        special_tokens: The tokenizer's special ids.
        image_token_ids: Ids that stand for images, which are not read.
        learns_positions: Whether positions beyond the context cannot be computed, as with learnt position embeddings.
    """

    traits: ModelTraits
    special_tokens: SpecialTokens
    learns_positions: bool = False
    image_token_ids: tuple[int, ...] = ()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The weights' device."""

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
            attention_mask: The keys that tokens see. Without a cache, keys are the tokens. With a cache, keys are the
                cache's entries; the tokens are written there first. Without a cache, the mask may also be ranges
                without spans, or ``None`` for causal attention over the sequence.
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

    def canvas_runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Return a function for canvases: :meth:`hidden_states` with a further argument, the ``signal``.

        The signal contains :meth:`soft_embeddings` for the previous step's predictions, or zeros without predictions. A
        model without self-conditioning ignores it.
        """
        run = self.runner()
        return lambda *arguments, signal=None: run(*arguments)  # noqa: ARG005

    def soft_embeddings(self, probabilities: Float[Tensor, "token vocab"]) -> Float[Tensor, "token hidden"] | None:  # noqa: ARG002
        """Return mean embeddings under distributions over all ids; ``None`` without self-conditioning."""
        return None

    def draft_runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]] | None:
        """Return a block drafter's forward, like :meth:`runner`; ``None`` without a block drafter."""
        return None

    @property
    def forward_cost(self) -> float:
        """Fixed cost of a forward pass, in positions per row: a / b if a pass costs a + b * positions."""
        return 32.0

    @abstractmethod
    def make_cache(self, num_rows: int) -> KVCache:
        """Return an empty cache with ``num_rows`` rows."""
