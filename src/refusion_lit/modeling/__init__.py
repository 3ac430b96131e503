"""Models: the adapter over transformers, attention patterns, key/value cache, the fused backbone, weight sharding."""
