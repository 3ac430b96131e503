"""Training: the LightningModule, its schedule, what a fit counts, and its validation loss."""
