"""WeDLM (arXiv 2512.22737): causal attention, and a window of masks that predict their own tokens.

The decoder ``WeDLM``, the objective ``DualStream`` with a clean and a masked stream, and the format of the published
checkpoints: Qwen2.5 (7B) and Qwen3 (8B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.branches import text_between
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, above_or_best, max_length
from refusion_lit.engine.requests import Branch, Draw, Forward, Reading, Steps
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import random_subset, shift_left
from refusion_lit.modeling.formats import CheckpointFormat, ExportLayout, ServingProgram, register
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens

_MIN_RATIO = 1e-8


@dataclass(frozen=True, kw_only=True)
class _WeDLMFormat(CheckpointFormat):
    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a config: Qwen3 if queries and keys are normalised, else Qwen2."""
        return super().library_options(values) | {"model_type": "qwen3" if values.get("qk_norm", False) else "qwen2"}


register(
    _WeDLMFormat(
        name="wedlm",
        family="WeDLM 7B and 8B",
        model_type="wedlm",
        base="qwen3",
        attention="causal",
        predictions=("mask", "next_token"),
        mask_tokens=("<|mask|>", "<|MASK|>"),
        decoder="WeDLM",
        layout=ExportLayout(
            repository="tencent/WeDLM-8B-Instruct",
            classes={
                "AutoConfig": "configuration_wedlm.WeDLMConfig",
                "AutoModel": "modeling_wedlm.WeDLMModel",
                "AutoModelForCausalLM": "modeling_wedlm.WeDLMForCausalLM",
            },
            architecture="WeDLMForCausalLM",
            options=(
                "attention_bias",
                "head_dim",
                "layer_types",
                "mask_token_id",
                "max_window_layers",
                "qk_norm",
                "torch_dtype",
            ),
            constants={"sliding_window": None, "use_cache": True, "use_sliding_window": False},
            absent_weights=("self_attn.o_proj.bias",),  # which Qwen3 has with attention_bias
            bases=("qwen2", "qwen3"),
            decoder_names={
                "window_size": "wedlm_window_size",
                "entropy_threshold": "wedlm_entropy_threshold",
                "position_penalty": "wedlm_pos_penalty_factor",
            },
            engines=(
                ServingProgram(
                    name="the authors' engine, in its checkout",
                    command="python example.py --model {model}",
                    values={"hidden_act": "silu"},
                ),
            ),
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class WeDLM(Decoder):
    """Fills a window's masks in parallel, and caches the filled tokens at the window's start a forward later.

    A forward feeds the window's filled tokens in text order, then its masks in text order, with their positions in the
    text. Causal attention over this sequence shows a mask all filled tokens and the masks to its left. Filled tokens
    never change. The filled tokens before the first mask directly follow cached text, so their keys and values are the
    same as in ordinary causal decoding. They stay in the cache, and the window moves past them. Other filled tokens are
    computed again in the next forward.

    The authors have two programs with different rules (``selection``):

    - ``entropy``: the released engine (streaming parallel decoding, arXiv 2512.22737, algorithm 1). The window slides:
      it reaches ``window_size`` places from its first mask, also beyond ``max_new_tokens``.
    - ``confidence``: ``generate_wedlm`` of the model's Python class. Blocks of ``window_size`` tokens are completed one
      after another; the last block may be shorter.

    Deliberate differences:

    - The first forward computes the prompt and the first window; the engine computes the prompt alone. No forward
      follows the completion of the text. So the engine makes two forwards more.
    - Decoding stops at the first EOS token; ``generate_wedlm`` goes on. Its ``temperature``, which changes
      confidences but draws nothing, is ``confidence_temperature`` here.
    - Temperature acts before top-p, not after; the mask token is never drawn.
    - As in the engine, the forward that caches leading tokens also refills the window; in the paper's algorithm, the
      refill comes later.

    Attributes:
        selection: Rule that selects the masks to fill: ``entropy`` or ``confidence``.
        window_size: Number of masks in the window, W (``wedlm_window_size``), or of tokens per block
            (``generate_wedlm``'s ``block_size``). The paper's tables use 6.
        entropy_threshold: For ``entropy``: fill masks whose entropy in nats plus penalty is below this number (tau,
            ``wedlm_entropy_threshold``), and always the best mask. ``None``: a token per forward, as in the paper's
            tables.
        position_penalty: For ``entropy``: penalty per position between a mask and the first mask (lambda,
            ``wedlm_pos_penalty_factor``), at least 0. The paper's tables use 0.1.
        confidence_threshold: For ``confidence``: fill masks whose token has at least this probability, in [0, 1], and
            always the best mask. ``None``: a token per forward (0.0 in ``generate_wedlm``).
        confidence_temperature: For ``confidence``: divides the logits before the probabilities are compared with
            ``confidence_threshold``, above 0 (``temperature`` of ``generate_wedlm``); it draws nothing.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published_2026/models/wedlm-tiny")
    >>> for decoder in WeDLM(entropy_threshold=0.6), WeDLM(selection="confidence", confidence_threshold=0.9):
    ...     [answer] = model.generate(["12+34,56+78>"], decoder=decoder, max_new_tokens=32)
    ...     answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=50;56+78=12;', 19, 17)
    ('12+34=60;56+78=106;', 20, 16)
    """

    requires = ModelRequirements(attention="causal", predictions=("mask",))
    shares = "all"

    ranges = {
        "window_size": 1,
        "entropy_threshold": "[-inf, inf]",
        "position_penalty": 0.0,
        "confidence_threshold": "[0, 1]",
        "confidence_temperature": "[1e-30, 1e30]",
    }
    selection: Literal["entropy", "confidence"] = "entropy"
    window_size: int = 16
    entropy_threshold: float | None = 0.4
    position_penalty: float = 0.02
    confidence_threshold: float | None = 0.9
    confidence_temperature: float = 1.0

    @property
    def _slides(self) -> bool:
        """Return whether the window slides; otherwise it waits until a block is complete."""
        return self.selection == "entropy"

    def _window_end(self, first_mask: int) -> int:
        """Return the first place behind the window, given the place of the window's first mask."""
        start = first_mask if self._slides else first_mask // self.window_size * self.window_size
        return start + self.window_size

    def refusal(self, prompt: Prompt) -> str | None:
        """Refuse given tokens beyond the first window, which the model does not see."""
        if not prompt.num_to_fill or prompt.given_length <= self._window_end(prompt.given.index(None)):
            return None
        return f"its model sees a window of {self.window_size} tokens and earlier text, and some text is given later"

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a canvas as long as the longest response and, for a sliding window, the masks beyond."""
        length = max_length(prompt, sampling, special_tokens)
        return RowState(prompt, sampling, special_tokens, length + self.window_size if self._slides else length)

    def step(self, state: RowState) -> Steps[None]:
        """Run a forward over the window; fill masks, and keep the leading tokens' entries in the KV cache."""
        start = max(state.num_cached - state.prompt_length, 0)
        first_mask = state.is_masked.index(True)
        stop = min(self._window_end(first_mask), len(state.tokens))
        places = [place for place in range(start, stop) if state.is_masked[place]]
        filled = [place for place in range(start, stop) if not state.is_masked[place]]
        branch = self._branch(state, [*filled, *places], len(places))
        by_entropy = self.selection == "entropy"
        draw = Draw(
            sampling=state.sampling,
            round=state.num_forwards,
            statistic="entropy" if by_entropy else None,
            confidence_temperature=1.0 if by_entropy else self.confidence_temperature,
        )
        [reading] = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        state.num_cached = state.prompt_length + first_mask
        chosen = self._choose(reading, [place - first_mask for place in places])
        state.commit([places[i] for i in chosen], [reading.tokens[i] for i in chosen])

    def _choose(self, reading: Reading, distances: Sequence[int]) -> list[int]:
        """Return the indices of the masks to fill, given their distances from the first mask."""
        if self.selection == "entropy":
            threshold = math.inf if self.entropy_threshold is None else -self.entropy_threshold
            penalties = (self.position_penalty * distance for distance in distances)
            negated = [-(entropy + more) for entropy, more in zip(reading.statistic, penalties, strict=True)]
            return above_or_best(negated, threshold)
        threshold = math.inf if self.confidence_threshold is None else self.confidence_threshold
        return above_or_best(reading.probabilities, threshold, is_inclusive=True)

    def _branch(self, state: RowState, window: Sequence[int], num_masks: int) -> Branch:
        """Return the prompt's uncached tokens and the window's places, which end with the masks."""
        start = state.num_cached
        positions = [*range(start, state.prompt_length), *(state.prompt_length + place for place in window)]
        text = text_between(state, start, max(positions) + 1)
        return Branch(
            tokens=[text[position - start] for position in positions],
            positions=positions,
            visible=((0, start),),
            write_at=start,
            draft_at=range(len(positions) - num_masks, len(positions)),
        )


@dataclass(frozen=True, kw_only=True)
class DualStream(Objective):
    """Predicts a block's masks from its clean tokens, its earlier masks, and all earlier clean blocks.

    WeDLM (arXiv 2512.22737): a forward over ``[prediction; memory]`` with repeated position ids. The memory stream is
    the clean text. In the prediction stream, every block draws a share gamma, uniform in [0, 1). Exactly this share of
    its response tokens, rounded, is masked at random places. The masks then move behind the block's clean tokens, with
    their position ids. Attention is causal: a prediction token sees its block up to itself and all earlier blocks in
    the memory; the memory sees itself. Blocks are counted from position 0, prompt included.

    Terms: ``mdm``, the masks' mean cross-entropy, weighted by 1 / gamma (the public trainer divides by the sum of
    weights, the paper writes a plain sum); ``ar``, the mean cross-entropy of the memory's next-token predictions. The
    loss is (mdm + ar_weight * ar) / (1 + ar_weight).

    Deliberate difference: the public trainer can append several learnable end-of-turn tokens to a response
    (``num_learnable_im_end``); here a response ends with a single EOS token.

    Attributes:
        block_size: Tokens per block, at least 1; decoders need not know it.
        ar_weight: Weight of the next-token term, relative to the masked term (``ar_loss_weight``), at least 0.

    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> corrupted = DualStream(block_size=2).corrupt(batch, KeyedNoise(batch.sample_keys), special)
    >>> corrupted.input_ids, corrupted.position_ids
    (tensor([[5, 6, 7, 2, 5, 6, 7, 8]]), tensor([[0, 1, 2, 3, 0, 1, 2, 3]]))
    """

    trained = ModelTraits(attention="causal", predictions=("mask", "next_token"))

    ranges = {"block_size": 1, "ar_weight": 0.0}
    block_size: int = 32
    ar_weight: float = 1.0

    @property
    def terms(self) -> Mapping[str, float]:
        """The masked and the next-token term."""
        return {"mdm": 1 / (1 + self.ar_weight), "ar": self.ar_weight / (1 + self.ar_weight)}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask a share of every block, move masks to the block's end, append the clean text.

        With ``mask_ratio``, all blocks of a row have this share; see :meth:`Objective.corrupt`.
        """
        mask_token_id = required_mask_id(self, special_tokens)
        num_tokens = batch.input_ids.shape[1]
        size = self.block_size
        positions, is_real = batch.positions, batch.is_real
        is_masked, weights = self._draw_masks(batch.in_response, noise, mask_ratio)

        # Clean tokens of a block, then its masks, both in text order; padding stays behind.
        key = torch.where(is_real, 2 * (positions // size) + is_masked, 2 * num_tokens)
        order = key.argsort(dim=1, stable=True)
        masked_tokens = batch.input_ids.where(is_masked, IGNORE_INDEX)
        following = shift_left(batch.input_ids.where(batch.in_response, IGNORE_INDEX), IGNORE_INDEX)
        follows = following != IGNORE_INDEX
        none = torch.zeros_like(is_masked)
        return CorruptedBatch(
            input_ids=torch.cat((batch.input_ids.masked_fill(is_masked, mask_token_id).gather(1, order),
                                 batch.input_ids), 1),
            position_ids=torch.cat((order, positions.expand_as(order)), 1),
            labels=torch.cat((masked_tokens.gather(1, order), following), 1),
            weights=torch.cat((weights.gather(1, order), follows.float()), 1),
            terms=torch.cat((none, ~none), 1).long(),
            # Weights are no integers, so a sum in float32 would depend on how a step is cut into micro-batches.
            counts=torch.stack((weights.double().sum(), follows.sum().double())),
            visible=three_part_ranges(num_tokens, size, batch.ends, causal=True),
            is_masked=torch.cat((is_masked.gather(1, order), none), 1),
            is_real=torch.cat((is_real, is_real), 1),
        )  # fmt: skip

    def _draw_masks(
        self, in_response: Bool[Tensor, "batch token"], noise: KeyedNoise, mask_ratio: MaskRatio
    ) -> tuple[Bool[Tensor, "batch token"], Float[Tensor, "batch token"]]:
        """Draw the masked tokens, an exact share of every block; return them and their weights."""
        num_tokens = in_response.shape[1]
        size = self.block_size
        num_blocks = -(-num_tokens // size)
        if mask_ratio is None:
            ratio = noise.uniform("block_ratio", num_blocks).clamp(min=_MIN_RATIO)
        else:
            ratio = mask_probability(noise, _MIN_RATIO, mask_ratio)[:, None].expand(-1, num_blocks)
        maskable = F.pad(in_response, (0, num_blocks * size - num_tokens)).unflatten(1, (num_blocks, size))
        order = noise.bits("token_order", num_blocks * size).unflatten(1, (num_blocks, size))
        is_masked = random_subset(order, maskable, (maskable.sum(-1) * ratio).round()).flatten(1)[:, :num_tokens]
        weights = (1 / ratio).float().repeat_interleave(size, 1)[:, :num_tokens]
        return is_masked, weights.where(is_masked, 0.0)
