"""Decoders that are saved with an exported model, for transformers' ``generate`` without this package."""
