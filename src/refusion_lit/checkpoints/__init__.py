"""Lightning checkpoints that need no config: their metadata, atomic and sharded files, and models from them."""
