"""Models: the backbone adapter over transformers, attention patterns, the slot cache."""
