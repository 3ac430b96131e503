"""Data: tokenizers, encoding, JSON schemas, tool calls, batching and the data module."""
