"""ReFusion (arXiv 2512.13586): decoder, infill, objectives, checkpoints and the program that an export holds."""

from refusion_lit.refusion import checkpoints  # noqa: F401 - registers the format
