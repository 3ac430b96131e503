"""Decoders and the engine that runs them: the public names of the engine, of ReFusion and of the families."""

from __future__ import annotations

from refusion_lit.contrib.apd import APD
from refusion_lit.contrib.card import CARD
from refusion_lit.contrib.d2f import D2F
from refusion_lit.contrib.rl.trajectory import Trajectory, TrajectoryRecorder, TrajectoryWriter, read_trajectories
from refusion_lit.contrib.set_diffusion import SetDiffusion
from refusion_lit.contrib.slot_search import SlotSearch
from refusion_lit.engine.checks import ModelMismatchError, check_context, check_model, check_prompts
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.engine.drafting import masked_in, rounds_since, text_between, text_branch, uncached, up_to_eos
from refusion_lit.engine.engine import Engine, decode
from refusion_lit.engine.kept_cache import KeptCache
from refusion_lit.engine.output import DecodingOutput, Generation, GenerationCallback, TraceRound
from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps
from refusion_lit.engine.stopping import TextStream, cut_at_stop
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.decoder import BlockDiffusion, TokenEditing
from refusion_lit.families.defaults import default_decoder, named_decoder
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.families.wedlm import WeDLM
from refusion_lit.families.zarya import FirstHitting
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.recompute import RecomputeKV

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
    "Engine",
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
    "TextStream",
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
    "named_decoder",
    "read_trajectories",
    "rounds_since",
    "text_between",
    "text_branch",
    "uncached",
    "up_to_eos",
]
