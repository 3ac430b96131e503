"""Block-causal models: BD3-LM, Fast-dLLM v2, SDAR, discrete diffusion forcing (D2F) and token editing."""

from refusion_lit.families.block_diffusion import checkpoints  # noqa: F401 - registers the formats
