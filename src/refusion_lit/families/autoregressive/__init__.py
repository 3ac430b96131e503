"""Next-token models, the baseline: a decoder and an objective, both named ``Autoregressive``."""
