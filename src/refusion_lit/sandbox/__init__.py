"""Runs code that a model wrote, apart from everything else.

Held off, where the isolation is ``full``: reading or changing files outside the run's own folder (but for the Python
installation and system libraries, which can be read), changing owners, modes and times of files, the network, other
processes (no signals, no tracing, none can be started), endless loops, and the use of more memory, processor time,
file size or open files than the limits say. Passing by an early end: a run has passed only if it returns a nonce that
is drawn after the tests have run, so that nothing the program can read, print or exit with beforehand helps it.

Not held off: the program shares its interpreter with its tests, so code that aims at them (objects that equal
everything, a forged message on the control socket by someone who knows this package) can pass wrongly; it cannot do
more than pass. Existence, sizes and times of files outside can be seen. Many files below the size limit can fill the
disk until the run's end. Faults of the kernel. For code from an enemy rather than from a model, use a virtual machine.
"""

from refusion_lit.sandbox.isolation import LEVELS, Isolation, Level
from refusion_lit.sandbox.runner import Limits, Outcome, Sandbox

__all__ = ["LEVELS", "Isolation", "Level", "Limits", "Outcome", "Sandbox"]
