"""Sweeps: runs over option combinations, in separate processes and directories, and a results table."""
