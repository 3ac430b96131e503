"""Decoders and the engine that runs them.

Importing this package is light: torch is loaded with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from refusion_lit.decoding.base import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.decoding.decoders.apd import APD
from refusion_lit.decoding.decoders.autoregressive import Autoregressive
from refusion_lit.decoding.decoders.block_diffusion import BlockDiffusion
from refusion_lit.decoding.decoders.card import CARD
from refusion_lit.decoding.decoders.d2f import D2F
from refusion_lit.decoding.decoders.fast_dllm import FastDLLM
from refusion_lit.decoding.decoders.first_hitting import FirstHitting
from refusion_lit.decoding.decoders.llada import LLaDA
from refusion_lit.decoding.decoders.recompute_kv import RecomputeKV
from refusion_lit.decoding.decoders.refusion import ReFusion
from refusion_lit.decoding.decoders.self_speculative import SelfSpeculative
from refusion_lit.decoding.decoders.set_diffusion import SetDiffusion
from refusion_lit.decoding.decoders.slot_search import SlotSearch
from refusion_lit.decoding.decoders.token_editing import TokenEditing
from refusion_lit.decoding.decoders.wedlm import WeDLM
from refusion_lit.decoding.defaults import default_decoder
from refusion_lit.decoding.output import DecodingOutput, Generation, GenerationCallback, TraceRound, cut_at_stop
from refusion_lit.decoding.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps

if TYPE_CHECKING:
    from refusion_lit.decoding.checks import ModelMismatchError, check_context, check_model, check_prompts
    from refusion_lit.decoding.engine import decode

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
    "WeDLM",
    "check_context",
    "check_model",
    "check_prompts",
    "cut_at_stop",
    "decode",
    "default_decoder",
    "most_certain",
]

_LAZY = {
    "ModelMismatchError": "refusion_lit.decoding.checks",
    "check_context": "refusion_lit.decoding.checks",
    "check_model": "refusion_lit.decoding.checks",
    "check_prompts": "refusion_lit.decoding.checks",
    "decode": "refusion_lit.decoding.engine",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
