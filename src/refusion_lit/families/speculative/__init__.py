"""Lossless self-speculative decoding, with a drafter on a frozen model or with a hybrid model's masks.

The decoder ``SelfSpeculative``, the objectives ``GatedDraft`` and ``BlockDraft`` (DFlash), and the program of exported
drafters.
"""
