"""Decoders and the engine that runs them: public names from the engine, ReFusion and the families."""

from __future__ import annotations

from typing import Any

import refusion_lit.families.llada2  # noqa: F401 - registers its checkpoint formats
from refusion_lit.engine.branches import (
    list_masked,
    list_uncached,
    rounds_since,
    text_between,
    text_branch,
    up_to_eos,
)
from refusion_lit.engine.checks import ModelMismatchError, check_context, check_model, check_prompts
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.engine.engine import Engine, decode
from refusion_lit.engine.kept_cache import KeptCache
from refusion_lit.engine.logprobs import TokenLogprob
from refusion_lit.engine.output import CallShapes, DecodingOutput, Generation, GenerationCallback, TraceRound
from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps
from refusion_lit.engine.stopping import TextStream, cut_at_stop
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.decoder import BlockDiffusion
from refusion_lit.families.block_diffusion.token_editing import TokenEditing
from refusion_lit.families.defaults import default_decoder, named_decoder, register_decoder
from refusion_lit.families.idlm import IntrospectiveStrided
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.nemotron import CausalBlockDiffusion, LinearSpeculation
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.families.uniform_diffusion import UniformDiffusion
from refusion_lit.families.wedlm import WeDLM
from refusion_lit.families.zarya import FirstHitting
from refusion_lit.plugins import find_class
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.recompute import RecomputeKV

__all__ = [
    "Autoregressive",
    "BlockDiffusion",
    "Branch",
    "CallShapes",
    "CausalBlockDiffusion",
    "Decoder",
    "DecodingOutput",
    "Draw",
    "Engine",
    "FastDLLM",
    "FirstHitting",
    "Forward",
    "Generation",
    "GenerationCallback",
    "IntrospectiveStrided",
    "KeptCache",
    "LLaDA",
    "LinearSpeculation",
    "ModelMismatchError",
    "ModelRequirements",
    "MoreDrafts",
    "ReFusion",
    "Reading",
    "RecomputeKV",
    "RowState",
    "SelfSpeculative",
    "Steps",
    "TextStream",
    "TokenEditing",
    "TokenLogprob",
    "TraceRound",
    "UniformDiffusion",
    "WeDLM",
    "check_context",
    "check_model",
    "check_prompts",
    "cut_at_stop",
    "decode",
    "default_decoder",
    "list_masked",
    "list_uncached",
    "most_certain",
    "named_decoder",
    "register_decoder",
    "rounds_since",
    "text_between",
    "text_branch",
    "up_to_eos",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of a plugin
    """Return a decoder from a plugin by name, such as ``CARD`` from :mod:`refusion_lit.contrib`."""
    return find_class(Decoder, name)
