"""Bidirectional masked models: LLaDA, Dream, Open-dLLM, and Fast-dLLM v1, which decodes them faster."""

import refusion_lit.families.llada.formats  # noqa: F401 - registers the checkpoint formats
