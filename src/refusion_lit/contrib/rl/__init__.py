"""Training on rewards: the objective, likelihoods of answers, and recorded trajectories; see docs/rewards.md."""

from refusion_lit.contrib.rl.likelihood import LeftToRight, Likelihood, NextToken
from refusion_lit.contrib.rl.objective import GroupPolicy, Reward
from refusion_lit.contrib.rl.trajectory import Trajectory, TrajectoryRecorder

__all__ = ["GroupPolicy", "LeftToRight", "Likelihood", "NextToken", "Reward", "Trajectory", "TrajectoryRecorder"]
