"""Serves a model over HTTP: OpenAI's API and a chat page.

The limits are defined here, because ``serve --help`` shows them even if the server's packages are not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refusion_lit.utils.require import check_options


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of requests.

    Attributes:
        max_prompt_tokens: Maximum number of tokens in a prompt, including tokens given by a schema.
        max_answer_tokens: Maximum number of tokens in an answer. Requests without ``max_tokens`` use
            ``max_new_tokens``.
        max_seconds: Maximum time per request, from the arrival of its head. The whole request must arrive within this
            time or 30 seconds, and the client must read an answer without longer pauses.
        max_waiting: Maximum number of answers that wait for a row; further requests get status 429.
        max_body_bytes: Maximum request size.
        drain_seconds: Time for answers in flight after SIGTERM or Ctrl-C; unfinished answers then get status 503, and
            the exit status is 3. A second signal ends this time.
    """

    ranges: ClassVar[dict[str, float | str]] = {
        "max_prompt_tokens": 1,
        "max_answer_tokens": 1,
        "max_seconds": 0.0,
        "max_waiting": 0,
        "max_body_bytes": 1,
        "drain_seconds": 0.0,
    }
    max_prompt_tokens: int = 4096
    max_answer_tokens: int = 1024
    max_seconds: float = 300.0
    max_waiting: int = 64
    max_body_bytes: int = 1_000_000
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_options(self)
