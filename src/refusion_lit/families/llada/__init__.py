"""Bidirectional masked models: LLaDA, Dream, Fast-dLLM v1, adaptive parallel decoding (APD) and R2FT."""

from refusion_lit.families.llada import checkpoints  # noqa: F401 - registers the formats
