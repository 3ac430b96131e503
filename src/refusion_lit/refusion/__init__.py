"""ReFusion (arXiv 2512.13586): decoder, infills, objectives, and the program that an export holds."""
