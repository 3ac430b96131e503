"""The thread that owns the engine: takes requests while it runs, and keeps the failure of one from the others.

An answer is a function of its request alone, so requests in flight may always start again: after a failed call of the
model, each one runs alone, and only the one that fails alone gets the error. Text that was streamed is not sent twice.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from refusion_lit.decoding import Decoder, Generation, GenerationCallback, RowState
from refusion_lit.engine.engine import Engine
from refusion_lit.engine.output import TextStream, TraceRound
from refusion_lit.engine.requests import MoreDrafts
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.serving import Limits
from refusion_lit.text_model import TextModel
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from refusion_lit.utils.errors import is_out_of_memory

log = logging.getLogger("refusion_lit.serving")

_STOPPING = HTTPException(503, "the server is stopping.", headers={"Retry-After": "30"})


@dataclass(frozen=True)
class Update:
    """New text of a response, its forwards so far and, for a watched job, the trace of the new ones."""

    text: str
    num_forwards: int
    rounds: Sequence[TraceRound]


@dataclass(kw_only=True)
class Job:
    """One response to be made.

    Attributes:
        prompt: The prompt.
        sampling: Length limit, sampling options and stop strings.
        tell: Receives updates and, last, the generation or an error; called by the worker's thread.
        deadline: When it is given up, by :func:`time.monotonic`; 0 once nobody waits for it any more.
        watched: Whether every forward is told.
        stream: Cuts the text into pieces.
        num_rounds: Forwards that were told.
        is_suspect: Whether it was in flight in a call that failed; it then runs alone.
    """

    prompt: Prompt
    sampling: SamplingParams
    tell: Callable[[Update | Generation | HTTPException], None]
    deadline: float
    stream: TextStream
    watched: bool = False
    num_rounds: int = 0
    is_suspect: bool = False

    def update(self, text: str, num_forwards: int, trace: Sequence[TraceRound]) -> None:
        """Tell what is new."""
        rounds = trace[self.num_rounds :]
        self.num_rounds = max(self.num_rounds, len(trace))
        if text or rounds:
            self.tell(Update(text, num_forwards, rounds))

    def is_over(self) -> bool:
        """Return whether it is too late, which is then told."""
        is_over = time.monotonic() > self.deadline
        if is_over:
            self.tell(HTTPException(504, "the time limit of a request is over"))
        return is_over


class Worker(GenerationCallback):
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
        has_failed: Whether the engine could not be made again after a failed call, so that the thread has ended.
        checked, engine, thread: The model, its logits checked; what decodes with it; the thread, which warms it up.
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
        self.has_failed = False
        self.checked = _checked(model.model_for(decoder))
        self._news = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: deque[Job] = deque()
        self._active: dict[int, Job] = {}
        self._stopped = False
        self._num_threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none.

        Raises:
            HTTPException: If the queue has no room for all of them (429), or the server is stopping (503).
        """
        with self._news:
            if self.is_draining or not self.thread.is_alive():
                raise _STOPPING
            num_free = max(self.options.batch_size - self.num_active, 0)
            if self.num_waiting + len(jobs) > self.limits.max_waiting + num_free:
                wait = {"Retry-After": str(1 + self.num_waiting // self.options.batch_size)}
                raise HTTPException(429, "the queue is full; try again later.", headers=wait)
            self._waiting.extend(jobs)
            self._news.notify()

    def abort(self, jobs: Sequence[Job]) -> None:
        """Drop jobs; finished ones are ignored."""
        with self._news:
            for job in jobs:
                job.deadline = 0.0
            self._news.notify()

    def stop(self) -> None:
        """Give up all jobs and end the thread."""
        with self._news:
            self.is_draining = True
            self._stopped = True
            self._news.notify()
        self.thread.join()

    @property
    def num_active(self) -> int:
        """Jobs in flight."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a row."""
        return len(self._waiting)

    def on_commit(self, index: int, state: RowState) -> None:
        """Tell a job what has become final, and which forwards there were."""
        job = self._active.get(index)
        if job is None:
            return  # the first prompt, which warms up
        row = next(row for row in self.engine.rows if row.index == index)
        trace = row.result.trace
        if isinstance(row.request, MoreDrafts):  # the last forward will draft further
            trace = trace[:-1]
        job.update(job.stream.piece(state.final_prefix()), state.num_forwards, trace)

    def _run(self) -> None:
        """Run jobs until the worker is stopped; in any case every job ends with a generation or an error."""
        torch.set_num_threads(self._num_threads)  # which torch keeps by thread
        end = _STOPPING
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
            self.has_failed = True
            end = _failure(error)
        with self._news:
            self.is_draining = True  # submit refuses jobs from here on: nothing would answer them
        for job in (*self._active.values(), *self._waiting):
            job.tell(end)
        self._active.clear()
        self._waiting.clear()

    def _renew(self) -> None:
        options = {"callbacks": [self], "detokenize": self.model.detokenize}
        self.engine = Engine(self.checked, self.decoder, self.options.batch_size, self.options, **options)

    def _take(self) -> bool:
        """Wait for work, drop what was aborted or is too late, and start jobs. Return whether to continue."""
        with self._news:
            while not (self._active or self._waiting or self._stopped):
                self._news.wait()
            self._waiting = deque(job for job in self._waiting if not job.is_over())
            for number in [number for number, job in self._active.items() if job.is_over()]:
                self.engine.abort(number)
                del self._active[number]
            while self._waiting and self.num_active < self.options.batch_size:
                runs_alone = self._waiting[0].is_suspect or any(job.is_suspect for job in self._active.values())
                if runs_alone and self._active:
                    break
                job, number = self._waiting.popleft(), next(self._numbers)
                self._active[number] = job
                self.engine.submit(number, job.prompt, job.sampling, trace=job.watched)
            return not self._stopped

    def _step(self) -> None:
        self.engine.num_sharing = self.num_active
        try:
            finished = self.engine.step()
        except Exception as error:
            self._recover(error)
            return
        for number, generation in finished.items():
            job = self._active.pop(number)
            job.update(job.stream.rest(generation.text), generation.num_forwards, generation.trace)
            job.tell(generation)

    def _recover(self, error: Exception) -> None:
        """Start again with a new engine, as the state after a failed call is undefined."""
        del self.engine  # releases the cache first
        self._renew()
        jobs = list(self._active.values())
        self._active.clear()
        if len(jobs) == 1:
            jobs[0].tell(_failure(error))
            return
        for job in jobs:
            job.is_suspect = True
        self._waiting.extendleft(reversed(jobs))


def _failure(error: Exception) -> HTTPException:
    """Return how an error is told to the client: without paths and other internals."""
    if is_out_of_memory(error):
        message = "out of memory: the prompt and max_tokens need more than this machine has; lower them"
        return HTTPException(503, message)
    is_ours = isinstance(error, ValueError | ArithmeticError)
    return HTTPException(500, str(error) if is_ours else f"the request failed ({type(error).__name__})")


def _checked(model: LanguageModel) -> LanguageModel:
    """Return a model that raises an error instead of returning logits that are not numbers."""
    checked = copy.copy(model)

    def guarded(head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def logits(hidden: Tensor) -> Tensor:
            found = head(hidden)
            if found.amax(-1).isnan().any():
                raise ArithmeticError("the model computed logits that are not numbers for this request")
            return found

        return logits

    checked.head_runner = lambda: guarded(model.head_runner())  # type: ignore[method-assign]
    return checked
