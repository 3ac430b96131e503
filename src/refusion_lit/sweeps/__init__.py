"""Sweeps: runs over combinations of options, in separate processes and directories, and a table of results."""
