"""DiffusionGemma: canvases of uniform noise, denoised after a causal text; decoder, objective and format."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from refusion_lit.engine.branches import branch_after
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState
from refusion_lit.engine.requests import Draw, Forward, Reading, Request, Steps
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability
from refusion_lit.learning.text_order import shift_left
from refusion_lit.modeling.formats import CheckpointFormat, register
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.types import ModelTraits, Prediction, SpecialTokens
from refusion_lit.utils.require import require, require_at_least

_EPS = 1e-4
"""Smallest probability with which training replaces a canvas token."""


@dataclass(frozen=True, kw_only=True)
class UniformDiffusion(Decoder):
    """Denoises canvases of random tokens, one after the other, as DiffusionGemma does.

    A causal forward pass over the text fills the KV cache. Up to ``num_steps`` further passes denoise a canvas of
    ``canvas_length`` random tokens; they see the text and the whole canvas. A step samples a token at every place and
    accepts the tokens with the lowest entropies. All other places get new random tokens. The most probable tokens of
    the last step, the *draft*, are final. A step's predictions condition the next step (self-conditioning).

    Canvases follow until an EOS token or ``max_new_tokens``. Tokens beyond this end are not returned. In addition to
    the steps, a forward pass over the text counts once per canvas.

    At temperature 0, the schedule's temperatures apply, and all seeds draw the same tokens. Above 0,
    ``temperature`` multiplies the schedule (1: as published), and the seed counts.

    Source: ``DiffusionGemmaForBlockDiffusion.generate`` of transformers. Deliberate differences: exactly
    ``max_new_tokens`` tokens, not whole canvases; a prompt's text does not depend on its batch.

    Attributes:
        canvas_length: Tokens per canvas, at least 1; must be the length in training.
        num_steps: Maximum number of steps per canvas (``max_denoising_steps``), at least 1.
        t_min: The temperature falls from ``t_max`` towards this value and never reaches it; in [0, 1000].
        t_max: The first step's temperature, in (0, 1000].
        entropy_bound: Accept tokens in rising order of entropy while the entropies of the tokens before sum up to at
            most this many nats; at least one token. At least 0.
        stability_threshold: A canvas is finished if it is confident and its draft equals the drafts of this many
            earlier steps. At least 0.
        confidence_threshold: A canvas is confident if its places' mean entropy is below this many nats; at least 0.
        num_noise_ids: Random tokens are below this id; ``None``: the tokenizer's number of tokens.

    >>> from refusion_lit.decoding import default_decoder
    >>> from refusion_lit.types import ModelTraits
    >>> default_decoder(ModelTraits(predictions=("visible",))) == UniformDiffusion()
    True
    """

    requires = ModelRequirements(attention="causal", predictions=("visible",))
    shares = "all_but_last"
    refuses = "it denoises canvases that start as noise everywhere"

    ranges = {
        "canvas_length": 1,
        "num_steps": 1,
        "t_min": "[0, 1000]",
        "t_max": "(0, 1000]",
        "entropy_bound": 0.0,
        "stability_threshold": 0,
        "confidence_threshold": 0.0,
        "num_noise_ids": 1,
    }
    canvas_length: int = 32
    num_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    num_noise_ids: int | None = None

    @property
    def keeps_text_order(self) -> bool:
        """A canvas stands behind the text in the cache."""
        return True

    def step_temperature(self, step: int) -> float:
        """Return a step's temperature; steps count down from ``num_steps`` to 1."""
        return self.t_min + (self.t_max - self.t_min) * step / self.num_steps

    def step(self, state: RowState) -> Steps[None]:
        """Read the text, denoise a canvas, and commit its draft."""
        start = state.num_committed
        yield from self._encode(state)
        canvas = self.random_tokens(state)
        drafts: list[list[int]] = []
        reading: Reading | None = None
        for step in range(self.num_steps, 0, -1):
            reading = yield from self._denoise(state, canvas, step, reading)
            drafts.append(reading.best)
            entropies = [abs(value) for value in reading.statistic]
            is_accepted = self.accept(entropies)
            noise = self.random_tokens(state)
            canvas = [pair[not kept] for *pair, kept in zip(reading.tokens, noise, is_accepted, strict=True)]
            if self.is_finished(drafts, entropies):
                break
        places = range(start, min(start + self.canvas_length, len(state.tokens)))
        state.commit(places, drafts[-1][: len(places)])

    def accept(self, entropies: Sequence[float]) -> list[bool]:
        """Return which places keep their tokens: the lowest entropies, by ``entropy_bound``."""
        is_accepted = [False] * len(entropies)
        total = 0.0
        for place in sorted(range(len(entropies)), key=lambda place: (entropies[place], place)):
            is_accepted[place] = total <= self.entropy_bound
            total += entropies[place]
        return is_accepted

    def is_finished(self, drafts: Sequence[list[int]], entropies: Sequence[float]) -> bool:
        """Return whether the last draft is stable and confident.

        Args:
            drafts: The drafts of all steps so far.
            entropies: The last step's entropies.
        """
        *before, draft = drafts[-self.stability_threshold - 1 :]
        is_stable = len(before) == self.stability_threshold and all(other == draft for other in before)
        return is_stable and fmean(entropies) < self.confidence_threshold

    def random_tokens(self, state: RowState) -> list[int]:
        """Return a canvas of uniform noise, which depends only on seed, prompt and number of forward passes."""
        key = stable_key("canvas", self._seed(state), state.prompt.id, state.num_forwards)
        bits = KeyedNoise(torch.tensor([key])).bits("token", self.canvas_length)[0]
        return (bits % (self.num_noise_ids or state.special_tokens.vocab_size)).tolist()

    def _seed(self, state: RowState) -> int:
        return state.sampling.seed if state.sampling.temperature else 0

    def _encode(self, state: RowState) -> Steps[None]:
        """Read the text that is not in the KV cache yet."""
        text = [*state.prompt.token_ids, *state.tokens[: state.num_committed]]
        start = state.num_cached
        draw = Draw(sampling=state.sampling.greedy(), with_probability=False)
        yield Forward(phase="encode", branches=(branch_after(start, text[start:]),), draw=draw)
        state.num_cached = len(text)

    def _denoise(
        self, state: RowState, canvas: Sequence[int], step: int, before: Reading | None
    ) -> Generator[Request, list[Reading], Reading]:
        """Run a step over a canvas; return the reading.

        Args:
            state: The prompt's state.
            canvas: The canvas's tokens.
            step: Number of remaining steps, including this step.
            before: The previous step's reading, which conditions this step; ``None`` in the first step.
        """
        temperature = self.step_temperature(step) * (state.sampling.temperature or 1.0)
        temperature = min(max(temperature, 1e-30), 1e30)  # the range of SamplingParams
        signal = None if before is None else before.signal
        places = range(len(canvas))
        branch = branch_after(state.num_cached, canvas, order=[0] * len(canvas), draft_at=places, signal=signal)
        draw = Draw(
            sampling=replace(state.sampling, temperature=temperature, seed=self._seed(state)),
            round=state.num_forwards,
            statistic="negative_entropy",
            with_probability=False,
            denoises=True,
        )
        [reading] = yield Forward(phase="denoise", branches=(branch,), draw=draw, canvas=True)
        return reading


@dataclass(frozen=True, kw_only=True)
class UniformBlock(Objective):
    """Predicts all tokens of a response block in which random tokens have replaced some tokens.

    A sample shows its text, read causally, and one canvas behind the text: a response block at a random multiple of
    ``canvas_length``. Every canvas token is replaced with probability t by a token drawn uniformly from the vocabulary.
    t is (1 - eps) u + eps, where eps is 0.0001 and u is drawn uniformly from [0, 1] per sample. The term ``diffusion``
    is the mean cross-entropy over all canvas tokens, replaced or not, with equal weights. The term ``ar`` is the mean
    cross-entropy of the text's next tokens.

    DiffusionGemma computes the canvas with its decoder. With probability ``self_conditioning``, the decoder runs twice:
    a first pass without gradients conditions the second. Models without self-conditioning compute text and canvas in
    one pass.

    Source: the fine-tuning script for DiffusionGemma in TRL. A block that is longer than the rest of the response is
    completed with EOS tokens (DiffusionGemma: padding), which are scored, too.

    Attributes:
        canvas_length: Tokens per canvas, at least 1.
        self_conditioning: Share of samples with self-conditioning, in [0, 1].
        ar_weight: Coefficient of the term ``ar``, at least 0.

    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> special = SpecialTokens(mask_token_id=None, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> corrupted = UniformBlock(canvas_length=4).corrupt(batch, KeyedNoise(batch.sample_keys), special)
    >>> corrupted.position_ids, corrupted.labels
    (tensor([[0, 1, 2, 3, 1, 2, 3, 4]]), tensor([[   6,    7,    8, -100,    6,    7,    8,    1]]))
    """

    packs = False
    ranges = {"canvas_length": 1, "self_conditioning": "[0, 1]", "ar_weight": 0.0}
    canvas_length: int = 32
    self_conditioning: float = 0.5
    ar_weight: float = 1.0

    @property
    def traits(self) -> ModelTraits:
        """A canvas's tokens predict themselves; with ``ar_weight``, the text predicts the next token."""
        predictions: tuple[Prediction, ...] = ("visible", "next_token") if self.ar_weight else ("visible",)
        return ModelTraits(predictions=predictions)

    @property
    def terms(self) -> Mapping[str, float]:
        """The canvas, and the text's next token."""
        return {"diffusion": 1.0, "ar": self.ar_weight}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Append a canvas to every text; see :meth:`Objective.corrupt`. A mask ratio replaces t."""
        num_rows, num_text = batch.input_ids.shape
        device = batch.input_ids.device
        num_blocks = (batch.response_lengths + self.canvas_length - 1) // self.canvas_length
        block = noise.bits("block", 1)[:, 0] % num_blocks
        start = batch.prompt_lengths + block * self.canvas_length
        places = torch.arange(self.canvas_length, device=device)
        positions = start[:, None] + places
        end = special_tokens.pad_token_id if special_tokens.draws_padding else special_tokens.eos_token_ids[0]
        clean = batch.input_ids.gather(1, positions.clamp(max=num_text - 1))
        clean = clean.where(positions < batch.ends[:, None], end)
        ratio = mask_probability(noise, _EPS, mask_ratio)[:, None]
        is_replaced = noise.uniform("replaced", self.canvas_length) < ratio
        random = noise.bits("random_token", self.canvas_length) % special_tokens.vocab_size
        text = batch.positions.expand(num_rows, -1)
        is_target = batch.in_response if self.ar_weight else torch.zeros_like(batch.in_response)
        next_tokens = shift_left(batch.input_ids.where(is_target, IGNORE_INDEX), IGNORE_INDEX)
        labels = torch.cat((next_tokens, clean), 1)
        is_labelled = labels != IGNORE_INDEX
        causal = torch.stack((torch.zeros_like(text), text + 1), -1)
        nothing = torch.zeros_like(causal)
        canvas = num_text + self.canvas_length * torch.arange(2, device=device)
        before = torch.stack((torch.zeros_like(start), start), -1)
        ranges = torch.stack((before, canvas.expand(num_rows, -1)), 1)[:, None].expand(-1, self.canvas_length, -1, -1)
        return CorruptedBatch(
            input_ids=torch.cat((batch.input_ids, random.where(is_replaced, clean)), 1),
            position_ids=torch.cat((text, positions), 1),
            labels=labels,
            weights=is_labelled.float(),
            terms=torch.cat((torch.ones_like(next_tokens), torch.zeros_like(clean)), 1),
            counts=torch.stack((is_labelled[:, num_text:].sum(), is_labelled[:, :num_text].sum())).float(),
            visible=torch.cat((torch.stack((causal, nothing), 2), ranges), 1),
            is_masked=torch.zeros_like(is_labelled),
            num_canvas=self.canvas_length,
            is_conditioned=noise.uniform("self_conditioning", 1)[:, 0] < self.self_conditioning,
        )


@dataclass(frozen=True, kw_only=True)
class _DiffusionGemmaFormat(CheckpointFormat):
    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the generation config's settings to the default decoder; keep what training has stored."""
        text = values.get("text_config")
        where = f"backbone.source: text_config of a {self.name} checkpoint"
        fix = "fetch config.json again"
        require(isinstance(text, Mapping), where, "a mapping of options", text, fix)
        assert isinstance(text, Mapping)
        known = {"full_attention", "sliding_attention"}
        layers, num_layers = text.get("layer_types") or [], text.get("num_hidden_layers")
        fits = isinstance(layers, list) and (not layers or num_layers in (None, len(layers)))
        require(fits, f"{where}: layer_types", f"a list of num_hidden_layers, which is {num_layers}", layers, fix)
        unknown = sorted({*map(str, layers)} - known)
        require(not unknown, f"{where}: layer_types", " or ".join(sorted(known)), ", ".join(unknown), fix)
        kinds = sorted({*map(str, layers or known)})
        rope = text.get("rope_parameters")
        groups = [rope.get(kind) for kind in kinds] if isinstance(rope, Mapping) else [rope]
        fits = rope is None or all(isinstance(group, Mapping) for group in groups)
        require(fits, f"{where}: rope_parameters", f"rotary options of {' and '.join(kinds)}", rope, fix)
        seen = text.get("use_bidirectional_attention")
        expected = "vision, or null: text is causal"
        require(seen in (None, "vision"), f"{where}: use_bidirectional_attention", expected, seen, fix)
        for name in ("rope_scaling", "partial_rotary_factor"):
            require(text.get(name) is None, f"{where}: {name}", "none, but rope_parameters", text.get(name), fix)
        taken, num_experts = text.get("top_k_experts"), text.get("num_experts")
        fits = isinstance(taken, int) and isinstance(num_experts, int) and 1 <= taken <= num_experts
        expected = f"an integer from 1 to num_experts, which is {num_experts}"
        require(fits, f"{where}: top_k_experts", expected, taken, fix)
        if "canvas_length" in values:
            require_at_least("backbone.source: canvas_length", values["canvas_length"], 1)
        added = {"generation_config", "refusion_lit"}
        options = super().library_options({name: value for name, value in values.items() if name not in added})
        settings = values.get("generation_config") or {}
        settings = {**settings, **(settings.get("sampler_config") or {}), "canvas_length": values.get("canvas_length")}
        settings["vocab_size"] = text.get("vocab_size")
        named = {name: settings.get(theirs) for name, theirs in _SETTINGS.items()}
        entry = options["refusion_lit"]
        entry["decoder"]["init_args"] |= {name: value for name, value in named.items() if value is not None}
        options["refusion_lit"] = {**entry, **(values.get("refusion_lit") or {})}
        return options


_SETTINGS = {
    "canvas_length": "canvas_length",
    "num_steps": "max_denoising_steps",
    "t_min": "t_min",
    "t_max": "t_max",
    "entropy_bound": "entropy_bound",
    "stability_threshold": "stability_threshold",
    "confidence_threshold": "confidence_threshold",
    "num_noise_ids": "vocab_size",
}
"""Options of :class:`UniformDiffusion`, and their names in ``config.json`` and ``generation_config.json``."""

register(
    _DiffusionGemmaFormat(
        name="diffusion_gemma",
        family="DiffusionGemma 26B-A4B",
        model_type="diffusion_gemma",
        base="diffusion_gemma",
        attention="causal",
        predictions=("visible",),
        has_mask=False,
        draws_padding=True,
        decoder="UniformDiffusion",
        decoder_options={"canvas_length": 256},
        reads_generation_config=True,
    )
)
