"""Training: the LightningModule, accumulation with exact losses, the learning-rate schedule, validation, signals."""
