"""ReFusion (arXiv 2512.13586): decoder, infill, objectives, checkpoint format, and the exported program.

Published checkpoints: Zarya (arXiv 2609.19868), a Qwen3 model under the prefix ``backbone.``, trained and decoded as
ReFusion.
"""

from __future__ import annotations

from refusion_lit.modeling.formats import CheckpointFormat, register

register(
    CheckpointFormat(
        name="zarya",
        family="Zarya 0.6B, 1.7B and 4B",
        model_type="zarya",
        base="qwen3",
        required={"backbone_class": ("Qwen3ForCausalLM",), "sequential_attn_mode": ("causal",)},
        weight_names=(("model", "backbone.model"), ("lm_head", "backbone.lm_head")),
        attention="causal",
        predictions=("mask", "next_token_in_slot"),
        mask_tokens=("<|mdm_mask|>",),
        decoder="ReFusion",
        decoder_options={"slot_size": 16, "num_serial_blocks": 4, "slot_threshold": 0.9, "token_threshold": 0.4},
    )
)
