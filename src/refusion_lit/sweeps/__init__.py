"""Sweeps: runs over combinations of options, each in its own process and directory, and one table of results."""

from refusion_lit.sweeps.launchers import Launcher, Local, Slurm
from refusion_lit.sweeps.points import Point, Sweep, plan
from refusion_lit.sweeps.running import SweepResult, describe, run

__all__ = ["Launcher", "Local", "Point", "Slurm", "Sweep", "SweepResult", "describe", "plan", "run"]
