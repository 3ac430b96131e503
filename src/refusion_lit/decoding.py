"""Decoders and the engine that runs them: the public names of all of them, and the default decoder by traits."""

from __future__ import annotations

from collections.abc import Mapping

from refusion_lit.engine.checks import ModelMismatchError, check_context, check_model, check_prompts
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.engine.drafting import masked_in, rounds_since, text_between, text_branch, uncached, up_to_eos
from refusion_lit.engine.engine import decode
from refusion_lit.engine.memory import KeptCache
from refusion_lit.engine.output import DecodingOutput, Generation, GenerationCallback, TraceRound
from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps
from refusion_lit.engine.stopping import cut_at_stop
from refusion_lit.engine.trajectory import Trajectory, TrajectoryRecorder, TrajectoryWriter, read_trajectories
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.d2f import D2F
from refusion_lit.families.block_diffusion.decoder import BlockDiffusion, TokenEditing
from refusion_lit.families.card import CARD
from refusion_lit.families.llada.apd import APD
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.set_diffusion import SetDiffusion
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.families.wedlm import WeDLM
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.recompute import RecomputeKV
from refusion_lit.refusion.search import SlotSearch
from refusion_lit.refusion.zarya import FirstHitting
from refusion_lit.types import ModelTraits

__all__ = [
    "APD",
    "CARD",
    "D2F",
    "Autoregressive",
    "BlockDiffusion",
    "Branch",
    "Decoder",
    "DecodingOutput",
    "Draw",
    "FastDLLM",
    "FirstHitting",
    "Forward",
    "Generation",
    "GenerationCallback",
    "KeptCache",
    "LLaDA",
    "ModelMismatchError",
    "ModelRequirements",
    "MoreDrafts",
    "ReFusion",
    "Reading",
    "RecomputeKV",
    "RowState",
    "SelfSpeculative",
    "SetDiffusion",
    "SlotSearch",
    "Steps",
    "TokenEditing",
    "TraceRound",
    "Trajectory",
    "TrajectoryRecorder",
    "TrajectoryWriter",
    "WeDLM",
    "check_context",
    "check_model",
    "check_prompts",
    "cut_at_stop",
    "decode",
    "default_decoder",
    "masked_in",
    "most_certain",
    "read_trajectories",
    "rounds_since",
    "text_between",
    "text_branch",
    "uncached",
    "up_to_eos",
]


NAMEABLE: Mapping[str, type[Decoder]] = {
    cls.__name__: cls
    for cls in (
        Autoregressive, BlockDiffusion, CARD, D2F, FastDLLM, LLaDA, ReFusion, SelfSpeculative, SetDiffusion,
        TokenEditing, WeDLM,
    )
}  # fmt: skip
"""Decoders that a model's config may name; nothing is imported by a name in a file."""


def default_decoder(traits: ModelTraits) -> Decoder:
    """Return the default decoder of models with these traits, where neither format nor config names one.

    By attention pattern and meaning of the logits:

    - causal: :class:`ReFusion`; :class:`Autoregressive` if tokens predict the next one and masks nothing;
      :class:`CARD` if masks predict the next token too; :class:`WeDLM` if masks predict themselves and clean tokens the
      next one everywhere; :class:`SetDiffusion` if masks predict themselves only where they see no other mask;
    - bidirectional: :class:`LLaDA`;
    - block-causal: :class:`BlockDiffusion`; :class:`D2F` if blocks are counted from the response on;
      :class:`TokenEditing` if visible tokens predict their own place.
    """
    shifted = traits.predictions is not None and "mask" not in traits.predictions
    if traits.attention == "bidirectional":
        return LLaDA(shifted=shifted)
    if traits.attention == "block_causal":
        assert traits.block_size is not None
        if traits.prompt_is_block:
            return D2F(block_size=traits.block_size)
        if "visible" in (traits.predictions or ()):
            return TokenEditing(block_size=traits.block_size)
        return BlockDiffusion(block_size=traits.block_size, shifted=shifted)
    if "isolated_mask" in (traits.predictions or ()):
        return SetDiffusion()
    if traits.predictions is None or "next_token_in_slot" in traits.predictions:
        return ReFusion()
    if "mask" in traits.predictions:
        return WeDLM()
    return CARD() if "mask_shifted" in traits.predictions else Autoregressive()
