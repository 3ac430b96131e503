"""Zarya (arXiv 2609.19868): checkpoints, changes to ReFusion's objective, and the any-order sampler FirstHitting.

Published checkpoints are Qwen3 models under the prefix ``backbone.``, trained and decoded as ReFusion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Real
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.engine.branches import list_uncached
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, mask_probability, required_mask_id
from refusion_lit.modeling.formats import CheckpointFormat, ExportLayout, register
from refusion_lit.noise import KeyedNoise, uniform_scalar
from refusion_lit.refusion.objective import Hybrid, corrupt_slots, draw_slot_sizes, most_slots
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import is_number, require

_EPS = 1e-3

register(
    CheckpointFormat(
        name="zarya",
        family="Zarya 0.6B, 1.7B and 4B",
        model_type="zarya",
        base="qwen3",
        required={"backbone_class": ("Qwen3ForCausalLM",), "sequential_attn_mode": ("causal",),
                  "diffusion_attn_mode": ("causal",)},
        weight_names=(("model", "backbone.model"), ("lm_head", "backbone.lm_head")),
        attention="causal",
        predictions=("mask", "next_token_in_slot"),
        mask_tokens=("<|mdm_mask|>",),
        decoder="ReFusion",
        decoder_options={"slot_size": 16, "num_serial_blocks": 4, "slot_threshold": 0.9, "token_threshold": 0.4},
        layout=ExportLayout(
            repository="ai-forever/Zarya-0.6B",
            classes={
                "AutoConfig": "configuration.ZaryaConfig",
                "AutoModel": "modeling.Zarya",
                "AutoModelForMaskedLM": "modeling.Zarya",
                "AutoModelForCausalLM": "modeling.Zarya",
            },
            architecture="Zarya",
            options=("attention_bias", "head_dim", "mask_token_id", "pad_token_id", "torch_dtype"),
            constants={"diffusion_shuffle": True, "sequential_shuffle": True},
            decoder_names={
                "slot_size": "slot_size",
                "num_serial_blocks": "serial_num_blocks",
                "slot_threshold": "slot_threshold",
                "token_threshold": "token_threshold",
            },
            generation={"slotted_generation": True, "serial_num_blocks": 2},
        ),
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Zarya(Hybrid):
    """:class:`Hybrid` with Zarya's changes (arXiv 2609.19868); by default all are off.

    Zarya's mix of the terms is ``mdm_weight`` = lambda and ``ar_weight`` = 1 - lambda.

    Attributes:
        slot_borders: Curriculum of slot sizes (Zarya's ``slot_step_borders``), with a border per size. Size i is used
            up to border i, a share of the optimizer steps in (0, 1], ascending; beyond the last border, the last size
            stays. Validation draws from all sizes. Zarya's borders are shares of an epoch: the same in a run of one
            epoch. ``None``: sizes are drawn.
        token_weights: Weights of masked tokens in a slot: ``equal`` (the paper) or ``harmonic`` (Zarya's
            ``ordered_sampling``). Harmonic weights fall within a slot: of n tokens, the first weighs about n times as
            much as the last.
        shuffle_masked: Put masked slots in random order, too (Zarya's ``diffusion_shuffle``), instead of text order.

    >>> objective = Zarya(slot_sizes=(4, 8), slot_borders=(0.5, 1.0))
    >>> objective.at(0.2).slot_sizes, objective.at(0.9).slot_sizes
    ((4,), (8,))
    """

    slot_borders: tuple[float, ...] | None = None
    token_weights: Literal["equal", "harmonic"] = "equal"
    shuffle_masked: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slot_borders is None:
            return
        has_all = isinstance(self.slot_borders, Sequence) and len(self.slot_borders) == len(self.slot_sizes)
        borders = (0.0, *self.slot_borders) if has_all else ()
        are_numbers = has_all and all(is_number(border, Real) for border in borders)
        are_valid = are_numbers and all(low < high <= 1 for low, high in pairwise(borders))
        expected = f"{len(self.slot_sizes)} ascending numbers in (0, 1], as many as slot_sizes, or null"
        require(are_valid, "objective.slot_borders", expected, self.slot_borders, "state where every size ends")

    def at(self, progress: float) -> Zarya:
        """Return the objective with the curriculum's slot size; see :meth:`Objective.at`."""
        if self.slot_borders is None:
            return self
        size = self.slot_sizes[sum(border < progress for border in self.slot_borders[:-1])]
        return replace(self, slot_sizes=(size,), slot_borders=None)

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Cut responses into slots, mask some, move clean slots forward; see :meth:`Objective.corrupt`."""
        probability = mask_probability(noise, self.eps, mask_ratio)
        slot_sizes = draw_slot_sizes(noise, self.slot_sizes)
        num_slots = most_slots(batch, self.slot_sizes)
        slot_is_masked = noise.uniform("slot_mask", num_slots) < probability[:, None]
        layout = corrupt_slots(
            batch,
            noise,
            slot_is_masked,
            slot_sizes=slot_sizes,
            mask_token_id=required_mask_id(self, special_tokens),
            masked_order=noise.bits("masked_order", num_slots) if self.shuffle_masked else None,
        )
        corrupted = self.targets(layout, mask_probability=probability, response_lengths=batch.response_lengths)
        if self.token_weights == "equal":
            return corrupted
        offset = (layout.position_ids - batch.prompt_lengths[:, None]).clamp(min=0)
        place = offset % slot_sizes[:, None]
        length = slot_sizes[:, None].minimum(batch.response_lengths[:, None] - offset + place).clamp(min=1)
        factor = harmonic_factor(place, length, probability, eps=self.eps)
        weights = torch.where(layout.terms == 1, corrupted.weights * factor, corrupted.weights)
        return replace(corrupted, weights=weights.float())


def harmonic_factor(
    place: Int[Tensor, "batch token"],
    length: Int[Tensor, "batch token"],
    mask_probability: Float[Tensor, " batch"],
    *,
    eps: float,
) -> Float[Tensor, "batch token"]:
    """Return p / q_j, where q_j grows linearly from about p / n at the slot's first token to p at the last token.

    Multiplied by 1 / p, a slot's weights sum to H_n = 1 + 1/2 + ... + 1/n times the sum of equal weights.

    Args:
        place: A token's place in its slot, j from 0.
        length: Number of tokens in the slot, n.
        mask_probability: p, by row.
        eps: Smallest mask probability.
    """
    p = mask_probability.double()[:, None]
    # With tiny p, the first q would exceed the last q.
    first = (eps + (1 - eps) * p / length).minimum(p)
    alone = (eps + (1 - eps) * p + p) / 2
    chance = torch.where(length == 1, alone, first + (p - first) * place / (length - 1).clamp(min=1))
    return p / chance


@dataclass(kw_only=True)
class GroupState(RowState):
    """State of FirstHitting.

    Attributes:
        groups: Groups of canvas places, in decoding order. A forward decodes a group.
    """

    groups: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FirstHitting(Decoder):
    """Decodes groups of tokens of random size, a group per forward, then the remaining tokens one by one.

    For causal models whose masks predict their own tokens. A group's tokens are predicted from their masks. The next
    forward feeds the clean group before the next group's masks, so the KV cache is exact. As in Zarya, the diffusion's
    time decides how many tokens a step unmasks, not the model's predictions: a token is unmasked when the time first
    hits it, hence the name.

    Deliberate differences: the prompt keeps its order; masks are never drawn; places after an EOS token are skipped
    once all places before it are known; at temperature 0 the most probable token is taken, without noise.

    Attributes:
        num_steps: Steps of the diffusion phase, at most a group per step; ``None``: a quarter of the masks.
        diffusion_share: Expected share of tokens decoded in groups (alpha_0), in [0, 1]. The other tokens follow in
            text order, a token per forward. With 1, the remaining tokens form a last group.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=FirstHitting(num_steps=4), max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=46;56+78=134;', 20, 4)
    """

    requires = ModelRequirements(attention="causal", predictions=("mask",))
    shares = "all"
    refuses = None  # given tokens join the context, at their own positions

    ranges = {"num_steps": 1, "diffusion_share": "[0, 1]"}
    num_steps: int | None = 16
    diffusion_share: float = 0.75

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> GroupState:
        """Create a canvas and draw the groups of masks."""
        state = GroupState(prompt, sampling, special_tokens)
        places = [place for place, is_masked in enumerate(state.is_masked) if is_masked]
        for size in self._sizes(state, len(places)):
            state.groups.append(places[:size])
            del places[:size]
        if self.diffusion_share < 1:
            state.groups += [[place] for place in places]
        elif places:
            state.groups.append(places)
        return state

    def _sizes(self, state: RowState, num_masks: int) -> Iterator[int]:
        """Yield the group sizes in the diffusion phase. A step unmasks every mask with the same chance."""
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
        """Return the expected share of known tokens at a time in [0, 1]; time runs from 1 to 0."""
        return self.diffusion_share * (1 - (1 - _EPS) * time)

    def step(self, state: GroupState) -> Steps[None]:  # type: ignore[override]
        """Feed the clean previous group and this group's masks; draw this group's tokens."""
        group = state.groups[state.num_forwards]
        clean = list_uncached(state)
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
