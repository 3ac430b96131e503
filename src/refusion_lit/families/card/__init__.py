"""CARD: causal attention, masks that predict the next token, blocks by confidence."""
