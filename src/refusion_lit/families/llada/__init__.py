"""Bidirectional masked models: LLaDA, Dream, Fast-dLLM v1, adaptive parallel decoding (APD) and R2FT.

The decoders ``LLaDA``, ``FastDLLM`` and ``APD``; the objectives ``Masked`` and ``R2FT``; published checkpoints of
LLaDA, Dream and Open-dLLM.
"""

from refusion_lit.families.llada import checkpoints  # noqa: F401 - registers the formats
