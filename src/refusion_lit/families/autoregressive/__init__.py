"""Next-token models: the baseline."""
