"""APD, adaptive parallel decoding: a masked model drafts, a second, autoregressive model verifies from the left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.families.llada.decoder import canvas_branch
from refusion_lit.utils.require import require_at_least, require_probability


@dataclass(frozen=True, kw_only=True)
class APD(Decoder):
    """Adaptive parallel decoding: accepts drafts from the left while the product of two models draws the same tokens.

    A round is two forwards. The masked model sees prompt, known tokens and the next ``max_lookahead`` masks, in both
    directions, and drafts all masks. The verifier, a small autoregressive model with the same tokenizer, reads the
    drafts over its cache. The target at a position is drawn from the normalised product p_masked^R p_verifier^(1 - R),
    with the noise that drew the draft. The first draft is always accepted, and those after it up to the first that is
    not its target. Text is committed from left to right. A round with one mask needs no verifier.

    The masked model recomputes prompt and window in each round; the verifier's cache, which ``num_cached`` counts, is
    exact.

    Source: APD (arXiv 2506.00413, algorithm 1) with ``kv_window`` off: its approximate cache of the masked model is not
    implemented. As in the paper and unlike the released program, draft and target share their noise; the program takes
    the most probable target, and applies the temperature twice. Deliberate differences: temperature, top-k and top-p
    act on the product too; the token before the drafts is fed to the verifier again, where the program keeps its logits
    (those of a wrong position once all drafts are accepted); a response ends at its first end of sequence.

    Attributes:
        mixture_weight: Weight R of the masked model in the product (``apd_mixture_weight``), in [0, 1]. 1 accepts every
            draft; 0 accepts only the verifier's own tokens.
        max_lookahead: Maximum number of masks drafted at once, M, at least 1; ``None``: all that are left.
        shifted: The masked model predicts a mask at the position before it (Dream).
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(
        attention="bidirectional", predictions=("mask", "verifier")
    )
    refuses = "it writes from left to right, and its verifier sees no text on the right of a token"

    mixture_weight: float = 0.7
    max_lookahead: int | None = 100
    shifted: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        require_probability("mixture_weight", self.mixture_weight)
        require_at_least("max_lookahead", self.max_lookahead, 1, optional=True)

    def requirements(self) -> ModelRequirements:
        """Return bidirectional attention, shifted predictions if ``shifted``, and a verifier."""
        return replace(self.requires, predictions=("mask_shifted", "verifier")) if self.shifted else self.requires

    def step(self, state: RowState) -> Steps[None]:
        """Draft masks, verify the drafts, and commit those that are accepted."""
        place = state.num_committed
        start = state.prompt_length
        shift = int(self.shifted)
        stop = min(place + (self.max_lookahead or len(state.tokens)), len(state.tokens))
        round_number = state.num_forwards  # drafts and targets use the same number, hence the same noise
        first = start + place - shift
        branch = canvas_branch(state, range(first, first + stop - place), shift=shift, num_places=stop)
        draw = Draw(sampling=state.sampling, round=round_number, with_probability=False)
        drafts = (yield Forward(phase="draft", branches=(branch,), draw=draw, cached=False))[0].tokens
        accepted = 1
        if len(drafts) > 1:
            draw = replace(draw, guidance=-self.mixture_weight)  # l_masked + (1 - R) (l_verifier - l_masked)
            branch = self._verification(state, drafts)
            verification = Forward(phase="verify", branches=(branch,), draw=draw, twin_at=first + 1)
            targets = (yield verification)[0].tokens
            is_other = (draft != target for draft, target in zip(drafts[1:], targets, strict=True))
            accepted += next((i for i, differs in enumerate(is_other) if differs), len(targets))
            state.num_cached = start + place + min(accepted, len(drafts) - 1)
        final = state.up_to_eos(drafts[:accepted])
        state.commit(range(place, place + len(final)), final)

    def _verification(self, state: RowState, drafts: list[int]) -> Branch:
        """Return the committed tokens that are not cached yet and all drafts but the last; each predicts the next."""
        start = state.num_cached
        place = state.num_committed
        text = [*state.prompt.token_ids, *state.tokens[:place], *drafts[:-1]]
        return Branch(
            tokens=text[start:],
            positions=range(start, len(text)),
            visible=((0, start),),
            write_at=start,
            shift=1,
            draft_at=range(state.prompt_length + place - start, len(text) - start),
        )
