"""A decoder that drafts the whole response in one forward and keeps it."""

from dataclasses import dataclass

from refusion_lit.decoding import Branch, Decoder, Draw, Forward, ModelRequirements, RowState, Steps


@dataclass(frozen=True, kw_only=True)
class OneShot(Decoder):
    """Drafts all tokens in one forward over the prompt and ``max_new_tokens`` masks, and commits them."""

    requires = ModelRequirements(attention="causal", predictions=("mask",))

    def step(self, state: RowState) -> Steps[None]:
        """Draft and commit the whole canvas."""
        canvas = range(len(state.tokens))
        tokens = [*state.prompt.token_ids, *(state.mask_token_id for _ in canvas)]
        branch = Branch(
            tokens=tokens,
            positions=range(len(tokens)),
            draft_at=range(state.prompt_length, len(tokens)),
        )
        (reading,) = yield Forward(phase="draft", branches=(branch,), draw=Draw(sampling=state.sampling))
        state.commit(canvas, reading.tokens)
