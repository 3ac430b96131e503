"""The thread that owns the engine: takes requests while it runs, and keeps the failure of one from the others.

An answer is a function of its request alone, so requests in flight may always start again: after a failed call of the
model, each one runs alone, and only the one that fails alone gets the error. Text that was streamed is not sent twice.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from refusion_lit.data.encoding import TextStream
from refusion_lit.decoding import Decoder, Generation
from refusion_lit.engine.engine import Engine
from refusion_lit.engine.output import TraceRound
from refusion_lit.engine.requests import MoreDrafts
from refusion_lit.serving import Limits
from refusion_lit.text_model import TextModel
from refusion_lit.traces.document import piece_of
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from refusion_lit.utils.errors import is_out_of_memory
from refusion_lit.utils.require import require

log = logging.getLogger("refusion_lit.serving")  # texts of users at level DEBUG only


@dataclass(frozen=True)
class Update:
    """What is new of a response.

    Attributes:
        text: New text.
        rounds: What new forwards drafted, verified and committed, for a watched job.
        generation: The whole response, once it has ended.
    """

    text: str
    rounds: Sequence[dict[str, Any]]
    generation: Generation | None = None


@dataclass(kw_only=True, eq=False)
class Job:
    """One response to be made.

    Attributes:
        prompt: The prompt.
        sampling: Length limit, sampling options and stop strings.
        tell: Receives pairs of the job and an update, or last an error; called by the worker's thread.
        deadline: When it is dropped, by :func:`time.monotonic`; 0 once nobody waits for it any more.
        watched: Whether every forward is told.
        stream: Cuts the text into pieces.
        num_rounds: Forwards that were told.
        has_begun, ended: For the one who asked: whether the client knows of it, and its response.
    """

    prompt: Prompt
    sampling: SamplingParams
    tell: Callable[[tuple[Job, Update | HTTPException]], object]
    deadline: float
    watched: bool
    stream: TextStream
    num_rounds: int = 0
    has_begun: bool = False
    ended: Generation | None = None


class Worker:
    """Runs jobs on one engine, in a thread of its own.

    Args:
        model: The model.
        decoder: The strategy of all jobs.
        sampling: Length limit and sampling options where a request has none.
        options: Rows, and how they are batched.
        limits: Among them, how many jobs may wait for a row.

    Attributes:
        is_ready: Whether the model has run once.
        is_draining: Whether no further jobs are taken.
        failure: Why the thread has ended before it was told to: the engine could not be made again after a failed call.
        stop_at: When the thread ends at the latest, by :func:`time.monotonic`, unless a call of the model hangs.
        checked, engine, thread: The model, its logits checked; what decodes with it; the thread, which warms it up.
        active, waiting: Jobs in flight by their numbers; jobs that wait for a row.
    """

    def __init__(
        self, model: TextModel, decoder: Decoder, sampling: SamplingParams, options: DecodingOptions, limits: Limits
    ) -> None:
        self.model = model
        self.decoder = decoder
        self.sampling = sampling
        self.options = options
        self.limits = limits
        self.is_ready = False
        self.is_draining = False
        self.failure: Exception | None = None
        self.checked = copy.copy(model.model_for(decoder))
        head_runner = self.checked.head_runner
        self.checked.head_runner = lambda: partial(_checked, head_runner())  # type: ignore[method-assign]
        self._news = threading.Condition()
        self.waiting: deque[Job] = deque()
        self.active: dict[int, Job] = {}
        self._suspects: set[int] = set()  # jobs that were in flight in a call that failed: each runs alone
        self.stop_at = math.inf
        self.thread = threading.Thread(target=self._run, args=[torch.get_num_threads()], name="engine", daemon=True)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none.

        Raises:
            HTTPException: If the queue has no room for all of them (429), or the server is stopping (503).
        """
        with self._news:
            if self.is_draining:
                raise _failure(None)
            most = self.options.batch_size + self.limits.max_waiting
            expected = f"at most {most} answers of a request, all that fit here"
            require(len(jobs) <= most, "n", expected, len(jobs), "lower it")
            if len(self.active) + len(self.waiting) + len(jobs) > most:
                wait = {"Retry-After": str(1 + len(self.waiting) // self.options.batch_size)}
                raise HTTPException(429, "the queue is full; try again later.", headers=wait)
            self.waiting.extend(jobs)
            self._news.notify()

    def drain(self, seconds: float) -> None:
        """Take no further jobs, and end the thread once the jobs are done or some seconds have passed."""
        with self._news:
            self.is_draining = True
            self.stop_at = min(self.stop_at, time.monotonic() + seconds)
            self._news.notify()

    def _run(self, num_threads: int) -> None:
        """Run jobs until the worker is stopped; in any case every job ends with a generation or an error."""
        torch.set_num_threads(num_threads)  # which torch keeps by thread
        try:
            self._renew()
            prompt = Prompt(token_ids=self.checked.special_tokens.eos_token_ids[:1], id="0")
            self.engine.submit(-1, prompt, self.sampling)
            self.engine.step()
            self.engine.abort(-1)
            self.is_ready = True
            while self._take():
                self._step()
        except Exception as error:
            log.exception("the engine has stopped")
            self.failure = error
        self.drain(0.0)  # submit refuses jobs from here on: nothing would answer them
        for job in (*self.active.values(), *self.waiting):
            job.tell((job, _failure(self.failure)))
        self.active, self.waiting = {}, deque()

    def _renew(self) -> None:
        rows = self.options.batch_size
        self.engine = Engine(self.checked, self.decoder, rows, self.options, detokenize=self.model.detokenize)

    def _take(self) -> bool:
        """Wait for work, drop what was aborted or is too late, and start jobs. Return whether to continue."""
        with self._news:
            self._news.wait_for(lambda: self.active or self.waiting or self.is_draining)
            now = time.monotonic()
            self.waiting = deque(job for job in self.waiting if now <= job.deadline)
            for number in [number for number, job in self.active.items() if now > job.deadline]:
                self.engine.abort(number)
                del self.active[number]
            self._suspects &= self.active.keys() | set(map(id, self.waiting))
            while self.waiting and len(self.active) < (1 if self._suspects else self.options.batch_size):
                job = self.waiting.popleft()
                self.active[id(job)] = job
                self.engine.submit(id(job), job.prompt, job.sampling, trace=job.watched)
            return not self.is_draining or (bool(self.active) and now < self.stop_at)

    def _step(self) -> None:
        self.engine.num_sharing = len(self.active)
        try:
            finished = self.engine.step()
            for row in self.engine.rows:
                job = self.active[row.index]
                has_committed = row.state.num_forwards in row.state.commit_rounds
                text = job.stream.piece(row.state.final_prefix()) if has_committed else ""
                # The drafts of the last forward may not be complete.
                trace = row.result.trace[: -1 if isinstance(row.request, MoreDrafts) else None]
                rounds = self._rounds(job, trace)
                if text or rounds:
                    job.tell((job, Update(text, rounds)))
        except Exception as error:
            self._recover(error)
            return
        for number, generation in finished.items():
            job = self.active.pop(number)
            job.tell((job, Update(job.stream.rest(generation.text), self._rounds(job, generation.trace), generation)))

    def _rounds(self, job: Job, trace: Sequence[TraceRound]) -> list[dict[str, Any]]:
        """Return what the forwards that are new to a watched job did, by place in the response."""
        start = len(job.prompt.token_ids)
        rounds = []
        for entry in trace[job.num_rounds :]:
            found = {"drafted": entry.positions, "verified": entry.scored, "committed": entry.accepted}
            places = {name: [position - start for position in positions] for name, positions in found.items()}
            rounds.append(
                {"phase": entry.phase, "texts": [piece_of(self.model, token) for token in entry.tokens], **places}
            )
        job.num_rounds = max(job.num_rounds, len(trace))
        return rounds

    def _recover(self, error: Exception) -> None:
        """Start again with a new engine, as the state after a failed call is undefined."""
        del self.engine  # releases the cache first
        self._renew()
        jobs = list(self.active.values())
        self.active.clear()
        if len(jobs) == 1:
            jobs[0].tell((jobs[0], _failure(error)))
            return
        self._suspects = set(map(id, jobs))
        self.waiting.extendleft(reversed(jobs))


def _failure(error: Exception | None) -> HTTPException:
    """Return how an error is told to the client: without paths and other internals. ``None``: the server stops.

    It is a new one for each request, as an error that is raised collects tracebacks.
    """
    if error is None:
        return HTTPException(503, "the server is stopping.", headers={"Retry-After": "30"})
    if is_out_of_memory(error):
        return HTTPException(503, "out of memory: the prompt and max_tokens need more than there is; lower them")
    is_ours = isinstance(error, ValueError | ArithmeticError)
    return HTTPException(500, str(error) if is_ours else f"the request failed ({type(error).__name__})")


def _checked(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Return logits, or raise an error if they are not numbers."""
    logits = head(hidden)
    if logits.amax(-1).isnan().any():
        raise ArithmeticError("the model computed logits that are not numbers for this request")
    return logits
