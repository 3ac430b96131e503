"""Training on rewards: the objective, exact likelihoods of answers, and the interface of rewards."""

from refusion_lit.contrib.rl.likelihood import LeftToRight, Likelihood, NextToken
from refusion_lit.contrib.rl.objective import GroupPolicy, Reward

__all__ = ["GroupPolicy", "LeftToRight", "Likelihood", "NextToken", "Reward"]
