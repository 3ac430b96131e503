"""An exception for finished work, and single-line reasons of exceptions for users."""

from __future__ import annotations

from pickle import UnpicklingError


class NothingToDoError(ValueError):
    """The requested work is already complete; commands print the message and succeed."""


def error_reason(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty.

    For an error from ``torch.load`` with ``weights_only``, the reason names the file's problem, because torch's message
    recommends loading the file with code execution.

    >>> error_reason(ValueError("broken header"))
    'broken header'
    >>> error_reason(TimeoutError())
    'TimeoutError'
    """
    if isinstance(error, UnpicklingError):
        message = str(error).lower()
        if "unsupported" in message and "unsupported operand" not in message:
            return "it holds more than tensors and plain values, which could run code when it is loaded"
        return "it is not what torch.save writes"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    r"""Return the last line of an error's message, without a full stop: where torch and transformers give the reason.

    >>> last_line(ValueError("Validation failed:\n  head_dim must be even."))
    'head_dim must be even'
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().removesuffix(".")


def write_error_reason(error: BaseException) -> str | None:
    """Return the operating system's reason for a failed write, or ``None`` for other errors.

    Python libraries may wrap the system's error; Rust libraries only include its text.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror or error_reason(cause)
        cause = cause.__cause__ or cause.__context__
    return error_reason(error) if "(os error" in str(error) else None
