"""What objectives share: the contract, batches, packing and the loss."""
