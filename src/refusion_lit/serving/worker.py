"""The thread that owns the engine: it takes jobs while it runs, and confines a failure to the job that causes it.

A response depends on its job alone, so a job in flight can always be started again. After a failed model call, every
job runs alone. The job that fails alone gets the error. Streamed text is not sent twice.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from refusion_lit.constraints.tool_calls import CallReader
from refusion_lit.decoding import Decoder, Generation, TokenLogprob
from refusion_lit.engine.engine import Engine
from refusion_lit.engine.output import TraceRound
from refusion_lit.engine.sequence import PromptSequence
from refusion_lit.engine.stopping import TextStream, cut_at_stop
from refusion_lit.modeling.devices import is_out_of_memory
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.serving import Limits
from refusion_lit.text_model import TextModel
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from refusion_lit.utils.require import require

log = logging.getLogger("refusion_lit.serving")  # users' texts are logged at level DEBUG only


@dataclass(frozen=True)
class Update:
    """An update to a response.

    Attributes:
        text: New text.
        rounds: Tokens that new forward passes drafted, verified and committed, if the job wants them.
        logprobs: The tokens whose text is sent with this update, with their log-probabilities (``None`` for tokens that
            a schema gives), if the job wants them.
        generation: The whole response, once it has ended.
    """

    text: str
    rounds: Sequence[dict[str, Any]]
    generation: Generation | None = None
    logprobs: Sequence[tuple[int, TokenLogprob | None]] = ()


@dataclass(kw_only=True, eq=False)
class Job:
    """A response to generate.

    Attributes:
        prompt: The prompt.
        sampling: Length limit, sampling options and stop strings.
        notify: Receives pairs of the job and an update, or finally an error; called by the worker's thread.
        deadline: Time (:func:`time.monotonic`) at which the job is dropped; 0 if no client waits for it.
        wants_rounds: Whether updates describe every forward pass.
        num_top_logprobs: Number of alternatives per token with log-probabilities; ``None``: no log-probabilities.
        detokenize: Turns the response's tokens into text.
        stream: Splits the text into pieces.
        num_rounds: Number of forward passes that updates have described.
        num_sent: Number of tokens whose log-probabilities were sent.
        num_characters: Number of characters of the tokens whose log-probabilities were sent. Set by the service.
        reader: Separates tool calls from text, if the response may call tools. Used by the service.
        has_begun: Whether the client has received a part of the response. Set by the service.
        result: The response, once the service has received it.
    """

    prompt: Prompt
    sampling: SamplingParams
    notify: Callable[[tuple[Job, Update | HTTPException]], object]
    deadline: float
    wants_rounds: bool
    detokenize: Callable[[list[int]], str]
    stream: TextStream
    num_top_logprobs: int | None = None
    num_rounds: int = 0
    num_sent: int = 0
    num_characters: int = 0
    reader: CallReader | None = None
    has_begun: bool = False
    result: Generation | None = None

    def take_logprobs(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> list[tuple[int, TokenLogprob | None]]:
        """Return the tokens whose log-probabilities were not sent yet, with their entries."""
        new = list(zip(tokens, entries, strict=False))[self.num_sent :]
        self.num_sent = max(self.num_sent, len(entries))
        return new


class CheckedModel:
    """A model that raises an error instead of returning NaN logits. Everything else is passed to the model.

    Args:
        model: The model to check.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the model
        return getattr(self._model, name)

    def head_runner(self) -> Callable[[Tensor], Tensor]:
        """Return the model's head with a check of the logits.

        Raises:
            ArithmeticError: By the returned function, if a logit is NaN.
        """
        head = self._model.head_runner()

        def checked_head(hidden: Tensor) -> Tensor:
            logits = head(hidden)
            if logits.amax(-1).isnan().any():
                raise ArithmeticError("the model computed logits that are not numbers for this request")
            return logits

        return checked_head


class Worker:
    """Runs jobs on an engine in a separate thread.

    Args:
        model: The model.
        decoder: The decoder of all jobs.
        sampling: Length limit and sampling options of requests that set none.
        options: Number of rows and options of batching.
        limits: Limits of requests.

    Attributes:
        checked_model: The model with a check of its logits.
        engine: The engine.
        thread: The thread that runs the engine.
        is_ready: Whether the model has run once.
        is_draining: Whether further jobs are refused.
        failure: The error that ended the thread early: after a failed call, no new engine could be made.
        grace_seconds: Time after ``stop_at`` for a running model call to end, and for clients to read their streams.
        stop_at: Time (:func:`time.monotonic`) at which the thread ends, unless a model call hangs.
        active: Jobs in flight by number.
        waiting: Jobs that wait for a row.
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
        self.checked_model: Any = CheckedModel(model.model_for(decoder))
        self._changed = threading.Condition()
        self.waiting: deque[Job] = deque()
        self.active: dict[int, Job] = {}
        self._suspects: set[int] = set()  # jobs of a failed call, which run one at a time
        self.stop_at = math.inf
        self.grace_seconds = 5.0
        self._num_cut = 0
        self.thread = threading.Thread(target=self._run, args=[torch.get_num_threads()], name="engine", daemon=True)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none.

        Raises:
            HTTPException: If the queue has no room for all jobs (429), or the server is stopping (503).
        """
        with self._changed:
            if self.is_draining:
                raise _to_http_error(None)
            most = self.max_jobs
            expected = f"at most {most} answers per request, the size of the queue"
            require(len(jobs) <= most, "n", expected, len(jobs), "lower it")
            if len(self.active) + len(self.waiting) + len(jobs) > most:
                wait = {"Retry-After": str(1 + len(self.waiting) // self.options.batch_size)}
                raise HTTPException(429, "the queue is full; try again later.", headers=wait)
            self.waiting.extend(jobs)
            self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Refuse further jobs; end the thread when all jobs are done, or after some seconds."""
        with self._changed:
            self.is_draining = True
            self.stop_at = min(self.stop_at, time.monotonic() + seconds)
            self._changed.notify()

    @property
    def max_jobs(self) -> int:
        """Maximum number of jobs in flight or waiting."""
        return self.options.batch_size + self.limits.max_waiting

    @property
    def num_cut(self) -> int:
        """Number of unfinished answers with waiting clients, now or when the thread ended."""
        return self._num_cut + sum(job.deadline > 0 for job in (*self.active.values(), *self.waiting))

    def _run(self, num_threads: int) -> None:
        """Run jobs until the worker stops; every job ends with a generation or an error."""
        torch.set_num_threads(num_threads)  # a setting per thread
        try:
            self._make_engine()
            prompt = Prompt(token_ids=self.checked_model.special_tokens.eos_token_ids[:1], id="0")
            self.engine.submit(-1, prompt, self.sampling)
            self.engine.step()
            self.engine.abort(-1)
            self.is_ready = True
            while self._admit():
                self._step()
        except Exception as error:
            log.exception("the engine has stopped")
            self.failure = error
        self.drain(0.0)  # from here on, submit refuses jobs
        self._num_cut = self.num_cut
        for job in (*self.active.values(), *self.waiting):
            job.notify((job, _to_http_error(self.failure)))
        self.active, self.waiting = {}, deque()

    def _make_engine(self) -> None:
        rows = self.options.batch_size
        self.engine = Engine(self.checked_model, self.decoder, rows, self.options, detokenize=self.model.detokenize)

    def _admit(self) -> bool:
        """Wait for jobs, drop jobs after their deadline, and start jobs. Return whether to continue."""
        with self._changed:
            self._changed.wait_for(lambda: self.active or self.waiting or self.is_draining)
            now = time.monotonic()
            self.waiting = deque(job for job in self.waiting if now <= job.deadline)
            for number in [number for number, job in self.active.items() if now > job.deadline]:
                self.engine.abort(number)
                del self.active[number]
            self._suspects &= self.active.keys() | set(map(id, self.waiting))
            while self.waiting and len(self.active) < (1 if self._suspects else self.options.batch_size):
                job = self.waiting.popleft()
                self.active[id(job)] = job
                self.engine.submit(
                    id(job), job.prompt, job.sampling, trace=job.wants_rounds, num_top_logprobs=job.num_top_logprobs
                )
            return not self.is_draining or (bool(self.active) and now < self.stop_at)

    def _step(self) -> None:
        """Run the engine's next step, and notify clients of new text and of finished answers."""
        self.engine.num_sharing = len(self.active)
        try:
            finished = self.engine.step()
            self.engine.output.call_shapes.counts.clear()  # counts would grow as long as the server runs
            for sequence in self.engine.running:
                self._send_progress(self.active[sequence.index], sequence)
        except Exception as error:
            self._recover(error)
            return
        for number, generation in finished.items():
            job = self.active.pop(number)
            rounds = self._rounds(job, generation.trace)
            entries = job.take_logprobs(generation.token_ids, generation.logprobs)
            text = cut_at_stop(job.detokenize(generation.token_ids), job.sampling.stop)
            job.notify((job, Update(job.stream.rest(text), rounds, generation, entries)))

    def _send_progress(self, job: Job, sequence: PromptSequence) -> None:
        """Send a job's new text with its log-probabilities, and the rounds that are complete."""
        state = sequence.state
        tokens: list[int] = []
        text = ""
        if state.num_forwards in state.commit_rounds:  # the last forward pass committed tokens
            tokens = state.final_prefix()
            text = job.stream.piece(tokens)
        # The drafts of the last forward pass may not be complete.
        trace = sequence.result.trace[: -1 if sequence.awaits_drafts else None]
        rounds = self._rounds(job, trace)
        if text or rounds:
            # Log-probabilities wait until the text of all their tokens is sent: a stream may hold back the last part.
            is_due = text and job.stream.is_complete(tokens)
            entries = sequence.logprobs.of_response(tokens) if sequence.logprobs is not None and is_due else []
            job.notify((job, Update(text, rounds, logprobs=job.take_logprobs(tokens, entries))))

    def _rounds(self, job: Job, trace: Sequence[TraceRound]) -> list[dict[str, Any]]:
        """Return the tokens that new forward passes drafted, verified and committed, by place in the response."""
        start = len(job.prompt.token_ids)
        rounds = []
        for entry in trace[job.num_rounds :]:
            positions = {"drafted": entry.positions, "verified": entry.scored, "committed": entry.accepted}
            places = {name: [position - start for position in group] for name, group in positions.items()}
            rounds.append(
                {"phase": entry.phase, "texts": [self.model.token_text(token) for token in entry.tokens], **places}
            )
        job.num_rounds = max(job.num_rounds, len(trace))
        return rounds

    def _recover(self, error: Exception) -> None:
        """Start again with a new engine, because the state after a failed call is undefined."""
        del self.engine  # frees the cache before a new cache is allocated
        self._make_engine()
        jobs = list(self.active.values())
        self.active.clear()
        if len(jobs) == 1:
            jobs[0].notify((jobs[0], _to_http_error(error)))
            return
        self._suspects = set(map(id, jobs))
        self.waiting.extendleft(reversed(jobs))


def _to_http_error(error: Exception | None) -> HTTPException:
    """Return the HTTP error for a failure, without paths and other internals; ``None``: the server stops.

    Every request needs a new object, because raising an error adds to its traceback.
    """
    if error is None:
        return HTTPException(503, "the server is stopping.", headers={"Retry-After": "30"})
    if is_out_of_memory(error):
        return HTTPException(503, "out of memory: the prompt and max_tokens need more than there is; lower them")
    is_ours = isinstance(error, ValueError | ArithmeticError)
    return HTTPException(500, str(error) if is_ours else f"the request failed ({type(error).__name__})")
