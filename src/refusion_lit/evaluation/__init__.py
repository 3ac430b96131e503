"""Evaluation: test and prediction loops, predictions files, likelihoods, the adapter for the lm-evaluation-harness."""
