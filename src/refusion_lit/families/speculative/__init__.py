"""Lossless self-speculative decoding with a frozen model's drafter, or with a hybrid model's masks.

The decoder ``SelfSpeculative``, the objectives ``GatedDraft`` and ``BlockDraft`` (DFlash), and the program that
exported drafters contain.
"""
