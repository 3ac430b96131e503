"""Models: the adapter over transformers, attention patterns, key/value cache, the lean body, weight sharding."""
