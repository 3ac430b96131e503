"""Lossless self-speculative decoding: drafters on frozen models, and slots of hybrid models left to right."""
