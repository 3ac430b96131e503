"""Paired model: a masked model that drafts and an autoregressive model that verifies, with one interface."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.utils.require import require

_UNKNOWN = -1e4
"""Logit of an id that one of the models lacks: never probable, but finite, so that products of models are defined."""


class PairedModel(LanguageModel):
    """Masked drafter and autoregressive verifier as one language model, for :class:`~refusion_lit.decoding.APD`.

    The masked model runs the forwards without a cache, the verifier those with one. Hidden states of both are padded to
    the larger model's size plus one element that identifies the model. Their type represents the values of both models
    exactly.

    Args:
        masked: The masked model, which drafts.
        verifier: The model that verifies drafts: causal, predicts the next token, with the same tokenizer. The
            predictions in its traits may be unknown.

    Raises:
        ValueError: If the verifier is not such a model, or the models do not fit each other.
    """

    def __init__(self, masked: LanguageModel, verifier: LanguageModel) -> None:
        known = verifier.traits.predictions
        attention = verifier.traits.attention
        holds = attention == "causal" and (known is None or "next_token" in known)
        expected = "a causal model that predicts the next token"
        require(holds, "verifier", expected, f"a {attention} one that predicts {known}", "load another one")
        holds = masked.device == verifier.device
        require(holds, "verifier", f"a model on {masked.device}", verifier.device, "load both on one device")
        own = masked.special_tokens.eos_token_ids
        other = verifier.special_tokens.eos_token_ids
        expected = f"the masked model's tokenizer, with the ends of sequence {own}"
        require(own == other, "verifier", expected, other, "load two models with one tokenizer")
        self._masked = masked
        self._verifier = verifier
        predictions = masked.traits.predictions
        self.traits = replace(masked.traits, predictions=None if predictions is None else (*predictions, "verifier"))
        self.special_tokens = masked.special_tokens
        limits = [model.max_positions for model in (masked, verifier) if model.max_positions is not None]
        self.max_positions = min(limits, default=None)
        empty = torch.zeros(1, 1, dtype=torch.long, device=masked.device)
        with torch.no_grad():
            states = [model.hidden_states(empty, empty, None) for model in (masked, verifier)]
            self._sizes = [each.shape[-1] for each in states]
            self._dtypes = [each.dtype for each in states]
            self._num_rows = masked.logits(states[0]).shape[-1]

    @property
    def device(self) -> torch.device:
        """Device of both models' weights."""
        return self._masked.device

    def hidden_states(  # noqa: D102
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: AttentionMask | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        model = self._masked if cache is None else self._verifier
        hidden = model.hidden_states(input_ids, position_ids, attention_mask, cache)
        hidden = hidden.to(torch.promote_types(*self._dtypes))  # exact, and exact on the way back
        hidden = F.pad(hidden, (0, max(self._sizes) - hidden.shape[-1]))
        return F.pad(hidden, (0, 1), value=float(cache is None))

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:
        """Apply the head of the model that computed the hidden states; all must come from the same model."""
        is_masked = bool(hidden.flatten(0, -2)[0, -1] > 0)
        if is_masked:
            return self._masked.logits(hidden[..., : self._sizes[0]].to(self._dtypes[0]))
        found = self._verifier.logits(hidden[..., : self._sizes[1]].to(self._dtypes[1]))
        return F.pad(found, (0, self._num_rows - found.shape[-1]), value=_UNKNOWN)

    def make_cache(self, num_rows: int) -> KVCache | None:
        """Return the verifier's cache; the masked model has none."""
        return self._verifier.make_cache(num_rows)
