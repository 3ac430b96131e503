"""Policy optimisation: likelihoods of answers, rewards, and the objective that weighs one by the other."""
