"""CARD: causal attention, masks that predict the next token, blocks by confidence.

The decoder ``CARD`` and the objective ``SoftTail``.
"""
