"""Autoregressive decoding, a token per forward: the baseline for other decoders."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.engine.branches import text_branch
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState
from refusion_lit.engine.requests import Draw, Forward, Steps


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Decoder):
    """Decodes token by token, with a KV cache.

    A response with n tokens costs n forwards. The first forward reads the prompt, later forwards read a single token.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> [answer] = model.generate(["12+34="], decoder=Autoregressive(), max_new_tokens=8)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('46;', 4, 4)
    """

    requires = ModelRequirements(attention="causal", predictions=("next_token",))
    shares = "all_but_last"
    refuses = "it writes from left to right and sees no text to the right"

    def step(self, state: RowState) -> Steps[None]:
        """Feed the tokens that are not cached yet, and draw the next token."""
        place = state.num_committed
        end = state.prompt_length + place
        branch = text_branch(state, state.num_cached, end, [end], shift=1)
        draw = Draw(sampling=state.sampling, with_probability=False)
        [reading] = yield Forward(phase="next_token" if place else "prefill", branches=(branch,), draw=draw)
        state.num_cached = end
        state.commit([place], reading.tokens)
