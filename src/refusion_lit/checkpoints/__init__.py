"""Lightning checkpoints that need no config: metadata, atomic and sharded files, and loading models."""
