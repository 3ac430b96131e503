"""Lossless self-speculative decoding: drafters on frozen models, and slots of hybrid models left to right.

The decoder ``SelfSpeculative``, the objective ``GatedDraft``, and the program that an exported drafter brings along.
"""
