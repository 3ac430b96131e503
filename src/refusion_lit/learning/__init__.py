"""Shared by objectives: the contract, batches, packing and the loss."""
