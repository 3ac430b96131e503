"""Training on rewards: the objective, likelihoods of answers, and rewards."""

from refusion_lit.policy.likelihood import LeftToRight, Likelihood, MaskedBound, NextToken
from refusion_lit.policy.objective import GroupPolicy
from refusion_lit.policy.reward import Reward
from refusion_lit.policy.rounds import Rounds

__all__ = ["GroupPolicy", "LeftToRight", "Likelihood", "MaskedBound", "NextToken", "Reward", "Rounds"]
