"""FirstHitting: Zarya's any-order sampler, which draws the groups of tokens before the first forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState
from refusion_lit.engine.drafting import uncached
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.keys import uniform_scalar

_EPS = 1e-3


@dataclass(kw_only=True)
class GroupState(RowState):
    """State of FirstHitting.

    Attributes:
        groups: Groups of canvas places; each group is decoded in one forward, in this order.
    """

    groups: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FirstHitting(Decoder):
    """Decodes groups of tokens, each in one forward, then the rest one by one; group sizes are drawn at random.

    For causal models whose masks predict themselves. A group's tokens are predicted from their masks. The next forward
    feeds them clean before the next group's masks, so the KV cache is exact. As in Zarya, the number of tokens
    unmasked in a step follows the diffusion's time (each token is unmasked when that time first hits it, hence the
    name) and does not depend on the model's predictions.

    Deliberate differences: the prompt keeps its order; masks are never drawn; places after an EOS token are left
    out once everything before it is known; at temperature 0 the most probable token is taken, without noise.

    Attributes:
        num_steps: Steps of the diffusion phase, at most one group each; ``None``: a quarter of the masks.
        diffusion_share: Expected share of the tokens decoded in groups (alpha_0), in [0, 1]; the others follow one per
            forward, in text order. With 1, all remaining tokens form one last group.
    """

    requires = ModelRequirements(attention="causal", predictions=("mask",))
    shares = "all"
    refuses = None  # given tokens join the context, at their own positions

    ranges = {"num_steps": 1, "diffusion_share": "[0, 1]"}
    num_steps: int | None = 16
    diffusion_share: float = 0.75

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> GroupState:
        """Create a canvas and draw the groups of its masks."""
        state = GroupState.blank(prompt, sampling, special_tokens)
        places = [place for place, is_masked in enumerate(state.is_masked) if is_masked]
        for size in self._sizes(state, len(places)):
            state.groups.append(places[:size])
            del places[:size]
        state.groups += [places] if self.diffusion_share == 1 and places else [[place] for place in places]
        return state

    def _sizes(self, state: RowState, num_masks: int) -> Iterator[int]:
        """Yield the sizes of the groups of the diffusion phase."""
        num_steps = max(-(-num_masks // 4), 1) if self.num_steps is None else self.num_steps
        for step in range(num_steps):
            before, after = (self._share_known(1 - (step + i) / num_steps) for i in (0, 1))
            chance = (after - before) / (1 - before)
            keys = ("group_size", state.sampling.seed, state.prompt.id, step)
            size = sum(uniform_scalar(*keys, i) < chance for i in range(num_masks))
            if 0 < size < num_masks:
                yield size
                num_masks -= size

    def _share_known(self, time: float) -> float:
        """Return the expected share of the tokens that are known at a time in [0, 1], from 1 down."""
        return self.diffusion_share * (1 - (1 - _EPS) * time)

    def step(self, state: GroupState) -> Steps[None]:  # type: ignore[override]
        """Feed the group before clean and this one as masks; draw its tokens."""
        group = state.groups[state.num_forwards]
        clean = uncached(state)
        branch = Branch(
            tokens=[*(token for token, _ in clean), *[state.mask_token_id] * len(group)],
            positions=[*(position for _, position in clean), *(state.prompt_length + place for place in group)],
            visible=((0, state.num_cached),),
            write_at=state.num_cached,
            draft_at=range(len(clean), len(clean) + len(group)),
        )
        draw = Draw(sampling=state.sampling, round=state.num_forwards, with_probability=False)
        [reading] = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        state.num_cached += len(clean)
        state.commit(group, reading.tokens)
