"""APD, adaptive parallel decoding: a masked model drafts, and a small autoregressive model verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.branches import text_branch, up_to_eos
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.utils.require import require

_UNKNOWN = -1e4
"""Logit of an id that the verifier lacks: never probable, but finite, so that the product of both models is defined."""


@dataclass(frozen=True, kw_only=True)
class APD(Decoder):
    """Accepts a masked model's drafts as long as a product of two models' distributions draws the same tokens.

    A round takes two forwards. The masked model sees the prompt, known tokens and the next ``max_lookahead`` masks, in
    both directions, and drafts all masks. The verifier, a small autoregressive model with the same tokenizer, reads the
    drafts over its cache. The target at a position is drawn from the normalised product p_masked^R p_verifier^(1 - R),
    with the same noise as the draft. The first draft is always accepted; later drafts are accepted until a draft
    differs from its target. Text is committed from left to right. A round with a single mask needs no verifier.

    The masked model recomputes prompt and window in every round. The verifier has an exact KV cache; ``num_cached``
    counts its entries.

    Source: APD (arXiv 2506.00413, algorithm 1) with ``kv_window`` off; the approximate cache of the masked model is not
    implemented. Draft and target share their noise, as in the paper; the released program takes the most probable
    target and applies the temperature twice. Deliberate differences: temperature, top-k and top-p also act on the
    product; the verifier reads the token before the drafts again, whereas the program keeps old logits (from a wrong
    position if all drafts were accepted); a response ends at its first EOS token.

    Attributes:
        mixture_weight: Weight R of the masked model in the product (``apd_mixture_weight``), in [0, 1]. 1 accepts every
            draft; 0 accepts only tokens that the verifier draws.
        max_lookahead: Maximum number of masks drafted at once, M, at least 1; ``None``: all remaining masks.
        shifted: The masked model predicts a mask at the position before it (Dream).

    >>> APD(mixture_weight=0.5, max_lookahead=32).requirements().predictions
    ('mask', 'verifier')
    """

    requires = ModelRequirements(attention="bidirectional", predictions=("mask", "verifier"))
    refuses = "it writes from left to right, and its verifier sees no text to the right"

    ranges = {"mixture_weight": "[0, 1]", "max_lookahead": 1}
    mixture_weight: float = 0.7
    max_lookahead: int | None = 100
    shifted: bool = False

    def pair(self, model: LanguageModel, verifier: LanguageModel) -> LanguageModel:
        """Combine the masked model and its verifier into a single model."""
        return PairedModel(model, verifier)

    def step(self, state: RowState) -> Steps[None]:
        """Draft masks, verify the drafts, and commit the accepted drafts."""
        place = state.num_committed
        start = state.prompt_length
        stop = min(place + (self.max_lookahead or len(state.tokens)), len(state.tokens))
        round_number = state.num_forwards  # drafts and targets use the same number, hence the same noise
        drawn = range(start + place, start + stop)
        branch = text_branch(state, 0, drawn.stop, drawn, order=[0] * drawn.stop, shift=int(self.shifted))
        draw = Draw(sampling=state.sampling, round=round_number, with_probability=False)
        drafts = (yield Forward(phase="draft", branches=(branch,), draw=draw, cached=False))[0].tokens
        accepted = 1
        if len(drafts) > 1:
            draw = replace(draw, guidance=-self.mixture_weight)  # l_masked + (1 - R) (l_verifier - l_masked)
            verification = self._verification(state, drafts)
            distance = branch.draft_at[1] - verification.draft_at[0]
            targets = (yield Forward(phase="verify", branches=(verification,), draw=draw, twin_at=distance))[0].tokens
            is_other = (draft != target for draft, target in zip(drafts[1:], targets, strict=True))
            accepted += next((i for i, differs in enumerate(is_other) if differs), len(targets))
            state.num_cached = start + place + min(accepted, len(drafts) - 1)
        final = up_to_eos(state, drafts[:accepted])
        state.commit(range(place, place + len(final)), final)

    def _verification(self, state: RowState, drafts: list[int]) -> Branch:
        """Return the branch that scores all drafts but the first: uncached text, then all drafts but the last."""
        start = state.num_cached
        first = state.prompt_length + state.num_committed  # position of the first draft
        last = first + len(drafts) - 1
        branch = text_branch(state, start, last, range(first + 1, last + 1), shift=1)
        return replace(branch, tokens=[*branch.tokens[: first - start], *drafts[:-1]])


class PairedModel(LanguageModel):
    """Combines a masked model and an autoregressive verifier into a single language model, for :class:`APD`.

    The masked model runs forwards without a KV cache, the verifier forwards with a cache. Hidden states are padded to
    the size of the larger model; a last element marks which model computed them. Their dtype represents both models'
    values exactly.

    Args:
        masked: The masked model, which drafts.
        verifier: Verifies drafts: a causal model that predicts the next token, with the same tokenizer. The predictions
            in its traits may be unknown.

    Raises:
        ValueError: If the verifier does not predict the next token causally, or device or tokenizer differ.
    """

    def __init__(self, masked: LanguageModel, verifier: LanguageModel) -> None:
        known = verifier.traits.predictions
        attention = verifier.traits.attention
        is_causal = attention == "causal" and (known is None or "next_token" in known)
        expected = "a causal model that predicts the next token"
        require(is_causal, "verifier", expected, f"a {attention} model that predicts {known}", "load another model")
        is_on_device = masked.device == verifier.device
        require(is_on_device, "verifier", f"a model on {masked.device}", verifier.device, "load both on one device")
        eos = masked.special_tokens.eos_token_ids
        verifier_eos = verifier.special_tokens.eos_token_ids
        expected = f"the masked model's tokenizer, with the EOS tokens {eos}"
        require(eos == verifier_eos, "verifier", expected, verifier_eos, "load two models with the same tokenizer")
        self._masked = masked
        self._verifier = verifier
        predictions = masked.traits.predictions
        self.traits = replace(masked.traits, predictions=None if predictions is None else (*predictions, "verifier"))
        self.special_tokens = masked.special_tokens
        limits = [model.context(in_text_order=False) for model in (masked, verifier)]
        limits = [limit for limit in limits if limit is not None]
        self.max_positions = min(limits, default=None)
        empty = torch.zeros(1, 1, dtype=torch.long, device=masked.device)
        with torch.no_grad():
            states = [model.hidden_states(empty, empty, None) for model in (masked, verifier)]
            self._sizes = [hidden.shape[-1] for hidden in states]
            self._dtypes = [hidden.dtype for hidden in states]
            self._num_rows = masked.logits(states[0]).shape[-1]

    @property
    def device(self) -> torch.device:
        """Device of both models."""
        return self._masked.device

    def runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Return :meth:`hidden_states` as a function; both models are inspected only once."""
        drafting, verifying = self._masked.runner(), self._verifier.runner()

        def states(
            ids: Tensor, positions: Tensor, attention_mask: AttentionMask | None, cache: KVCache | None = None
        ) -> Tensor:
            hidden = (drafting if cache is None else verifying)(ids, positions, attention_mask, cache)
            hidden = hidden.to(torch.promote_types(*self._dtypes))  # exact, and exact on the way back
            hidden = F.pad(hidden, (0, max(self._sizes) - hidden.shape[-1]))
            return F.pad(hidden, (0, 1), value=float(cache is None))

        return states

    def head_runner(self) -> Callable[..., Float[Tensor, "*shape vocab"]]:
        """Return a head that applies the LM head of the states' model. A call must not mix states of both models."""
        drafting, verifying = self._masked.head_runner(), self._verifier.head_runner()

        def logits(hidden: Tensor) -> Tensor:
            is_masked = bool(hidden.flatten(0, -2)[0, -1] > 0)
            if is_masked:
                return drafting(hidden[..., : self._sizes[0]].to(self._dtypes[0]))
            values = verifying(hidden[..., : self._sizes[1]].to(self._dtypes[1]))
            return F.pad(values, (0, self._num_rows - values.shape[-1]), value=_UNKNOWN)

        return logits

    def make_cache(self, num_rows: int) -> KVCache:
        """Return a KV cache for the verifier; the masked model has no cache."""
        return self._verifier.make_cache(num_rows)
