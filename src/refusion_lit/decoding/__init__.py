"""Decoders and the engine that runs them."""

from refusion_lit.decoding.base import Decoder, ModelRequirements, RowState
from refusion_lit.decoding.decoders.autoregressive import Autoregressive
from refusion_lit.decoding.decoders.block_diffusion import BlockDiffusion
from refusion_lit.decoding.decoders.fast_dllm import FastDLLM
from refusion_lit.decoding.decoders.llada import LLaDA
from refusion_lit.decoding.decoders.refusion import RecomputeKV, ReFusion
from refusion_lit.decoding.engine import ModelMismatchError, decode
from refusion_lit.decoding.output import DecodingOutput, GenerationCallback, RowOutput

__all__ = [
    "Autoregressive",
    "BlockDiffusion",
    "Decoder",
    "DecodingOutput",
    "FastDLLM",
    "GenerationCallback",
    "LLaDA",
    "ModelMismatchError",
    "ModelRequirements",
    "ReFusion",
    "RecomputeKV",
    "RowOutput",
    "RowState",
    "decode",
]
