"""Next-token models: the baseline. A decoder and an objective, both called ``Autoregressive``."""
