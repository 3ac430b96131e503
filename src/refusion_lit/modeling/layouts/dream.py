"""Dream (arXiv 2508.15487): Qwen2 with bidirectional attention; a mask is predicted by the position before it."""

from __future__ import annotations

from refusion_lit.modeling.layouts.base import Layout

DREAM = Layout(
    name="dream",
    family="Dream v0 7B Base and Instruct, Dream-Coder",
    model_type="Dream",
    base="qwen2",
    architecture="DreamModel",
    auto_map={
        "AutoConfig": "Dream-org/Dream-v0-Instruct-7B--configuration_dream.DreamConfig",
        "AutoModel": "Dream-org/Dream-v0-Instruct-7B--modeling_dream.DreamModel",
    },
    attention="bidirectional",
    predictions=("mask_shifted",),
    mask_tokens=("<|mask|>",),
    end_tokens=("<|im_end|>",),
    slow_tokenizer="Qwen2Tokenizer",
    decoder="LLaDA",
    decoder_options={"order": "entropy", "shifted": True},
)
