"""Decoders and the engine that runs them."""

from refusion_lit.decoding.base import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.decoding.checks import ModelMismatchError, check_context, check_model
from refusion_lit.decoding.decoders.autoregressive import Autoregressive
from refusion_lit.decoding.decoders.block_diffusion import BlockDiffusion
from refusion_lit.decoding.decoders.fast_dllm import FastDLLM
from refusion_lit.decoding.decoders.llada import LLaDA
from refusion_lit.decoding.decoders.recompute_kv import RecomputeKV
from refusion_lit.decoding.decoders.refusion import ReFusion
from refusion_lit.decoding.engine import decode
from refusion_lit.decoding.output import DecodingOutput, Generation, GenerationCallback, TraceRound, cut_at_stop
from refusion_lit.decoding.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps

__all__ = [
    "Autoregressive",
    "BlockDiffusion",
    "Branch",
    "Decoder",
    "DecodingOutput",
    "Draw",
    "FastDLLM",
    "Forward",
    "Generation",
    "GenerationCallback",
    "LLaDA",
    "ModelMismatchError",
    "ModelRequirements",
    "MoreDrafts",
    "ReFusion",
    "Reading",
    "RecomputeKV",
    "RowState",
    "Steps",
    "TraceRound",
    "check_context",
    "check_model",
    "cut_at_stop",
    "decode",
    "most_certain",
]
