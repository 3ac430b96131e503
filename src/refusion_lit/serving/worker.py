"""The thread that owns the engine: takes requests while it runs, and keeps the failure of one from the others.

An answer is a function of its request alone, so requests in flight may always start again: after a failed call of the
model, each one runs alone, and only the one that fails alone gets the error. Text that was streamed is not sent twice.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from refusion_lit.api import TextModel
from refusion_lit.decoding import Decoder, Generation, GenerationCallback, RowState
from refusion_lit.engine.engine import Engine
from refusion_lit.engine.lengths import choose_lengths
from refusion_lit.engine.output import TextStream, TraceRound
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from refusion_lit.utils.errors import is_out_of_memory


class BusyError(RuntimeError):
    """The queue is full; try again after ``retry_after`` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the queue is full")
        self.retry_after = retry_after


class DrainingError(RuntimeError):
    """The server is stopping and takes no further requests."""


class BrokenLogitsError(ArithmeticError):
    """The model computed logits that are not numbers."""


@dataclass(frozen=True)
class Update:
    """News of a response that grows.

    Attributes:
        text: New final text.
        num_forwards: Forwards so far.
        rounds: The forwards since the last update, if the job is watched.
    """

    text: str
    num_forwards: int
    rounds: Sequence[TraceRound] = ()


@dataclass(frozen=True)
class Failure:
    """The end of a job without an answer.

    Attributes:
        status: The HTTP status that says so.
        message: What happened.
    """

    status: int
    message: str


@dataclass(kw_only=True)
class Job:
    """One response to be made.

    Attributes:
        prompts: The prompt, or candidates of which the most probable one is taken (templates of several lengths).
        sampling: Length limit, sampling options and stop strings.
        tell: Receives updates and, last, the generation or a failure; called by the worker's thread.
        deadline: When it is given up, by :func:`time.monotonic`.
        watched: Whether every forward is told.
        stream: Cuts the text into pieces.
        num_rounds: Forwards that were told.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    tell: Callable[[Update | Generation | Failure], None]
    deadline: float
    watched: bool = False
    stream: TextStream = field(init=False)
    num_rounds: int = 0


class Worker(GenerationCallback):
    """Runs jobs on one engine, in a thread of its own.

    Args:
        model: The model.
        decoder: The strategy of all jobs.
        options: Rows, and how they are batched.
        max_waiting: Maximum number of jobs that wait for a row.

    Attributes:
        is_ready: Whether the model has decoded its first prompt.
        num_calls: Calls of the model.
        is_draining: Whether no further jobs are taken.
        checked: The model, whose logits are checked.
    """

    def __init__(self, model: TextModel, decoder: Decoder, options: DecodingOptions, max_waiting: int) -> None:
        self.model = model
        self.decoder = decoder
        self.options = options
        self.max_waiting = max_waiting
        self.is_ready = False
        self.num_calls = 0
        self.checked = _Checked(model.model_for(decoder))
        self._news = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: deque[tuple[int, Job]] = deque()
        self._suspects: deque[tuple[int, Job]] = deque()  # in flight in a call that failed; run alone
        self._active: dict[int, Job] = {}
        self._aborted: set[int] = set()
        self.is_draining = False
        self._stopped = False
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which first decodes a token to warm up."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> list[int]:
        """Queue jobs, all or none; return their numbers.

        Raises:
            BusyError: If the queue has no room for all of them.
            DrainingError: If the server is stopping.
        """
        with self._news:
            if self.is_draining or not self._thread.is_alive():
                raise DrainingError("the server is stopping")
            if len(self._waiting) + len(jobs) > self.max_waiting + self.num_free:
                raise BusyError(1 + len(self._waiting) // self.options.batch_size)
            for job in jobs:
                job.stream = TextStream(self.model.detokenize, job.sampling.stop)
            numbers = [next(self._numbers) for _ in jobs]
            self._waiting.extend(zip(numbers, jobs, strict=True))
            self._news.notify()
        return numbers

    def abort(self, numbers: Sequence[int]) -> None:
        """Drop jobs; unknown and finished ones are ignored."""
        with self._news:
            self._aborted.update(numbers)
            self._news.notify()

    def drain(self) -> None:
        """Take no further jobs."""
        with self._news:
            self.is_draining = True

    def stop(self) -> None:
        """Give up all jobs and end the thread."""
        with self._news:
            self.is_draining = True
            self._stopped = True
            self._news.notify()
        self._thread.join()

    @property
    def num_active(self) -> int:
        """Jobs in flight."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting) + len(self._suspects)

    @property
    def num_free(self) -> int:
        """Free rows."""
        return max(self.options.batch_size - len(self._active) - len(self._suspects), 0)

    def on_commit(self, index: int, state: RowState) -> None:
        """Tell a job what has become final, and which forwards there were."""
        job = self._active[index]
        rounds: Sequence[TraceRound] = ()
        if job.watched:
            row = next(row for row in self._engine.rows if row.index == index)
            rounds = row.result.trace[job.num_rounds :]
            job.num_rounds = max(job.num_rounds, len(row.result.trace))
        text = job.stream.piece(state.final_prefix())
        if text or rounds:
            job.tell(Update(text, state.num_forwards, rounds))

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # which torch keeps by thread
        with torch.no_grad():
            self._engine = self._new_engine()
            self._warm_up()
            self.is_ready = True
            while self._take():
                self._step()
        for _, job in [*self._active.items(), *self._suspects, *self._waiting]:
            job.tell(Failure(503, "the server is stopping"))

    def _warm_up(self) -> None:
        """Decode a prompt, with the smallest length limit that the decoder accepts."""
        prompt = Prompt(token_ids=(self.model.backbone.special_tokens.eos_token_ids[0],), id="0")
        for length in (1, 8, 64, 512):
            with contextlib.suppress(ValueError):
                sampling = SamplingParams(max_new_tokens=length)
                self.decoder.check(sampling)
                self.model.decode([prompt], self.decoder, sampling, allow_mismatch=True)
                return

    def _new_engine(self) -> Engine:
        options = {"callbacks": [self], "detokenize": self.model.detokenize}
        return Engine(self.checked, self.decoder, self.options.batch_size, self.options, **options)

    def _take(self) -> bool:
        """Wait for work; drop what was aborted or is too late; admit jobs. Return whether to continue."""
        with self._news:
            while not (self._active or self._waiting or self._suspects or self._stopped):
                self._aborted.clear()
                self._news.wait()
            if self._stopped:
                return False
            gone = self._aborted
            self._aborted = set()
            now = time.monotonic()
            for queue in (self._waiting, self._suspects):
                kept = [pair for pair in queue if pair[0] not in gone and not self._is_late(pair[1], now)]
                queue.clear()
                queue.extend(kept)
        for number, job in list(self._active.items()):
            if number in gone or self._is_late(job, now):
                self._engine.abort(number)
                del self._active[number]
        self._admit()
        return True

    def _is_late(self, job: Job, now: float) -> bool:
        if now <= job.deadline:
            return False
        job.tell(Failure(504, "the time limit of a request is over"))
        return True

    def _admit(self) -> None:
        """Give free rows to waiting jobs; suspects, and jobs with several candidates, run alone."""
        if self._suspects:
            if not self._active:
                self._submit(*self._suspects.popleft())
            return
        while self._waiting and len(self._active) < self.options.batch_size:
            if len(self._waiting[0][1].prompts) > 1:
                if not self._active:
                    self._choose(self._waiting.popleft()[1])
                return
            with self._news:
                pair = self._waiting.popleft()
            self._submit(*pair)

    def _submit(self, number: int, job: Job) -> None:
        self._active[number] = job
        self._engine.submit(number, job.prompts[0], job.sampling, trace=job.watched)

    def _step(self) -> None:
        try:
            finished = self._engine.step() if self._active else {}
        except Exception as error:
            self._recover(error)
            return
        self.num_calls += self._engine.num_calls
        self._engine.num_calls = 0
        for number, generation in finished.items():
            job = self._active.pop(number)
            text = job.stream.rest(generation.text)
            rounds = generation.trace[job.num_rounds :]
            if text or rounds:
                job.tell(Update(text, generation.num_forwards, rounds))
            job.tell(generation)

    def _recover(self, error: Exception) -> None:
        """Start again with a new engine, as what the failed call left behind is undefined."""
        jobs = list(self._active.items())
        self._active.clear()
        del self._engine  # releases the cache first
        self._engine = self._new_engine()
        if len(jobs) > 1:
            self._suspects.extend(jobs)
            return
        for _, job in jobs:
            job.tell(_failure(error))

    def _choose(self, job: Job) -> None:
        """Decode the candidates of a template, and take the most probable one."""

        def run(prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Generation]:
            batching = {"batch_size": self.options.batch_size, "allow_mismatch": self.options.allow_mismatch}
            return self.model.decode(prompts, self.decoder, sampling, trace=True, **batching).rows

        ends = self.model.backbone.special_tokens.eos_token_ids
        try:
            [row] = choose_lengths(run, [job.prompts], job.sampling, ends)
        except Exception as error:
            job.tell(_failure(error))
            return
        job.tell(Update(job.stream.rest(row.text), row.num_forwards))
        job.tell(row)


def _failure(error: Exception) -> Failure:
    """Return how an error is told to the client: without paths and other internals."""
    if is_out_of_memory(error):
        return Failure(503, "out of memory: the prompt and max_tokens need more than this machine has; lower them")
    if isinstance(error, ValueError | BrokenLogitsError):
        return Failure(500, str(error))
    return Failure(500, f"the request failed ({type(error).__name__})")


class _Checked(LanguageModel):
    """A model that raises an error instead of returning logits that are not numbers."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.traits = model.traits
        self.special_tokens = model.special_tokens
        self.max_positions = model.max_positions
        self.learns_positions = model.learns_positions

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def forward_cost(self) -> float:
        return self._model.forward_cost

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: AttentionMask | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        return self._model.hidden_states(input_ids, position_ids, attention_mask, cache)

    def runner(self) -> Callable[..., Tensor]:
        return self._model.runner()

    def make_cache(self, num_rows: int) -> KVCache | None:
        return self._model.make_cache(num_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        if logits.amax(-1).isnan().any():
            raise BrokenLogitsError("the model computed logits that are not numbers for this request")
        return logits
