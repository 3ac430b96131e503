"""Checkpoints: metadata that describes a model, atomic files, sharded files."""
