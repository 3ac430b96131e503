"""Data: tokenizers, encoding, batching and the data module."""
