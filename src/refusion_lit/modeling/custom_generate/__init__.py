"""Decoders that an export carries along, for transformers' ``generate`` without this package."""
