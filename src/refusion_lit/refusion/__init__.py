"""ReFusion (arXiv 2512.13586): decoder, infill, objectives, and the exported program."""
