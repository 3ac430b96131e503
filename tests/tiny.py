"""The architecture of the smallest model that tests train, save and load."""

from __future__ import annotations

from typing import Any

TINY_QWEN: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
