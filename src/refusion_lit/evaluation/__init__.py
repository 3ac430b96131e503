"""Adapters for other projects' evaluation programs."""
