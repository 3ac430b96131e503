"""Lossless self-speculative decoding, with a drafter on a frozen model or with a hybrid model's masks.

The decoder ``SelfSpeculative``, the objective ``GatedDraft``, and the program of exported drafters.
"""
