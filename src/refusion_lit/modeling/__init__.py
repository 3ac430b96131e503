"""Models: the adapter over transformers, attention patterns, KV cache, the fused backbone, weight sharding."""
