"""Block-causal models: BD3-LM, Fast-dLLM v2, SDAR and LLaDA2.1's token editing."""

import refusion_lit.families.block_diffusion.formats  # noqa: F401 - registers the checkpoint formats
