"""Sweeps: runs over combinations of options, each in its own process and directory, and one table of results."""
