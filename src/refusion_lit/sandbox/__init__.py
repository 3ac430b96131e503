"""Runs generated code in a sandboxed process.

With ``full`` isolation the sandbox prevents:

- reading or changing files outside the run's directory, except reading the Python installation and system libraries;
- changing owners, modes and times of files;
- network access;
- starting, signalling or tracing processes;
- infinite loops, and exceeding the limits on memory, processor time, size of a file, and open files;
- passing by exiting early: a run passes only if it returns a nonce that is drawn after the tests have finished, so
  nothing that the program reads, prints or returns before can help.

The sandbox does not prevent:

- wrong passes of code that targets its tests, since both share an interpreter: objects that compare equal to
  everything, or a forged message on the control socket by code that knows this package. Such code passes, but cannot
  do more;
- finding out existence, sizes and times of outside files;
- filling the disk with many files until its time is up; its directory is deleted at the end;
- kernel exploits.

Use a virtual machine for code that comes from an attacker instead of a model.
"""

from refusion_lit.sandbox.runner import LEVELS, Level, Limits, Outcome, Sandbox

__all__ = ["LEVELS", "Level", "Limits", "Outcome", "Sandbox"]
