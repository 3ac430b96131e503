"""A model for EleutherAI's lm-evaluation-harness (``pip install lm-eval``)."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from refusion_lit.data.encoding import encode_parts, encode_text
from refusion_lit.data.rendering import render_chat
from refusion_lit.decoding import Decoder, check_context
from refusion_lit.evaluation import likelihood
from refusion_lit.evaluation.likelihood import Likelihood
from refusion_lit.modeling.vocabulary import find_added_tokens, starts_with_bos
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
from refusion_lit.utils.require import require, require_at_least, require_choice

_GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "seed"}
_MAX_TOKENS = 256
"""Maximum response length in tokens if the task sets none."""


def require_one_process() -> None:
    """Refuse several processes of torchrun or accelerate, because every process would run all tasks.

    Raises:
        ValueError: If the environment names several processes.
    """
    num_processes = os.environ.get("WORLD_SIZE", "1")
    fix = "start it without torchrun or accelerate launch, and divide the tasks over several commands"
    require(num_processes in ("", "0", "1"), "WORLD_SIZE", "one process for lm-evaluation-harness", num_processes, fix)


class RefusionLitModel(LM):
    """A model for the lm-evaluation-harness, with a decoder and a likelihood estimate.

    Args:
        model: The model.
        decoder: The decoder; by default ``TextModel.default_decoder``.
        likelihood: How ``loglikelihood`` is computed: ``autoregressive`` (exact, for causal models that predict the
            next token) or ``monte_carlo_masked`` (an estimate of the bound, for models that predict masks).
        num_draws: Number of masked states for ``monte_carlo_masked``.
        batch_size: Number of prompts (or masked states) per forward pass. Changes no token.
        seed: Seed for sampling and masked states.
        allow_mismatch: Only warn if the model was not trained for the decoder or the estimate.

    Attributes:
        used_decoders: Distinct decoders that have generated text. The default decoder depends on a task's length limit.

    Raises:
        ValueError: If an option is impossible, or there are several processes.
    """

    def __init__(
        self,
        model: TextModel,
        decoder: Decoder | None = None,
        likelihood: Likelihood = "autoregressive",
        num_draws: int = 128,
        batch_size: int = 16,
        seed: int = 0,
        allow_mismatch: bool = False,
    ) -> None:
        super().__init__()
        require_one_process()
        require_choice("likelihood", likelihood, get_args(Likelihood))
        require_at_least("batch_size", batch_size, 1)
        require_at_least("num_draws", num_draws, 1)
        self.model = model
        self.decoder = decoder
        self.likelihood: Likelihood = likelihood
        self.num_draws = num_draws
        self.batch_size = batch_size
        self.seed = seed
        self.allow_mismatch = allow_mismatch
        self.used_decoders: list[Decoder] = []
        self._has_template = False
        self._rendered: dict[str, list[tuple[str, bool]]] = {}
        self._totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def _decoder_for(self, sampling: SamplingParams) -> Decoder:
        return self.decoder or self.model.default_decoder.adapt_to(sampling)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Answer prompts; a task's prompts with equal options share forward passes.

        Raises:
            ValueError: If no decoder supports an option, or a prompt is too long. Nothing has been decoded then.
        """
        groups: defaultdict[tuple[str, SamplingParams], list[int]] = defaultdict(list)
        prompts = []
        names = _names(requests)
        answers = [""] * len(requests)
        for index, request in enumerate(requests):
            sampling = self._read_sampling(request.args[1])
            self._decoder_for(sampling).check(sampling)
            prompts.append(self._encode(request.args[0]))
            lengths = [(len(prompts[-1]), names[index])]
            check_context(self.model.backbone, lengths, sampling.max_new_tokens, self._decoder_for(sampling))
            groups[str(request.task_name), sampling].append(index)
        for (task, sampling), indices in groups.items():
            decoder = self._decoder_for(sampling)
            if decoder not in self.used_decoders:
                self.used_decoders.append(decoder)
            started = time.perf_counter()
            generations = self.model.generate_ids(
                [prompts[i] for i in indices],
                decoder=decoder,
                sampling=sampling,
                batch_size=self.batch_size,
                ids=[names[i] for i in indices],
                allow_mismatch=self.allow_mismatch,
            )
            self._seconds[task] += time.perf_counter() - started
            for index, generation in zip(indices, generations, strict=True):
                answers[index] = generation.text  # of the tokens alone, as the harness decodes
                self._totals[task].update(
                    num_prompts=1, num_tokens=generation.num_tokens, num_forwards=generation.num_forwards
                )
                self.cache_hook.add_partial("generate_until", requests[index].args, generation.text)
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Return log-likelihoods of continuations in nats, by the estimate in ``likelihood``.

        Raises:
            ValueError: If the estimate does not fit the model or a text is too long. Nothing has been estimated then.
        """
        pairs = [self._split(*request.args) for request in requests]
        self._check_lengths(requests, pairs)
        answers = []
        for request, pair in zip(requests, pairs, strict=True):
            answers.append(self._loglikelihood(*pair))
            self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Return log-likelihoods of whole texts in nats, after one BOS token, or after EOS if there is no BOS.

        A text beyond the model's context is scored in the windows of the harness's own models: a window begins after
        the scored tokens, and the last window reaches back to fill the context.

        Raises:
            ValueError: If the estimate does not fit the model. Nothing has been estimated then.
        """
        likelihood.check_likelihood(self.model.backbone, self.likelihood, allow_mismatch=self.allow_mismatch)
        texts = [self._encode_plain(request.args[0]) for request in requests]
        answers = []
        for request, tokens in zip(requests, texts, strict=True):
            tokens = tokens[1:] if tokens[:1] == [self._start] else tokens
            answers.append(sum(self._loglikelihood(*pair)[0] for pair in self._windows(tokens)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render turns with the tokenizer's chat template.

        As in the harness, system turns are left out if the template refuses the turns with them.

        Raises:
            ValueError: If there is no chat template, or it refuses the turns.
        """
        if not self.model.tokenizer.chat_template:
            raise ValueError("apply_chat_template: expected a tokenizer with a chat template, got none; leave it out.")
        self._has_template = True
        # The harness hands over the text later; names of special tokens in documents are recognised by the parts.
        try:
            parts = render_chat(self.model.tokenizer, chat_history, is_open=add_generation_prompt)
        except ValueError:
            turns = [turn for turn in chat_history if turn["role"] != "system"]
            if len(turns) == len(chat_history):
                raise
            parts = render_chat(self.model.tokenizer, turns, is_open=add_generation_prompt)
            warnings.warn("system_instruction: left out, as the chat template refuses system turns", stacklevel=2)
        rendered = "".join(text for text, _ in parts)
        self._rendered[rendered] = parts
        return rendered

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's chat template, for the harness's records."""
        template = self.model.tokenizer.chat_template
        return str(template) if chat_template and template else None

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, under which the harness caches rendered requests."""
        return str(self.model.tokenizer.name_or_path).replace("/", "__")

    def throughput(self) -> dict[str, dict[str, float]]:
        """Return totals over the responses so far, and ratios of the totals, by task."""
        return {
            task: {
                **totals,
                "seconds": self._seconds[task],
                "tokens_per_forward": totals["num_tokens"] / totals["num_forwards"],
                "tokens_per_second": totals["num_tokens"] / self._seconds[task],
            }
            for task, totals in self._totals.items()
        }

    def _read_sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling options of a task's ``generation_kwargs``.

        Raises:
            ValueError: If an option is unknown to the harness or cannot be honoured.
        """
        try:
            values: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), default_max_gen_toks=_MAX_TOKENS))
        except (TypeError, ValueError) as error:
            got = f"{dict(options)} ({error})"
            raise ValueError(f"generation_kwargs: expected options of the harness, got {got}; correct them.") from error
        expected = ", ".join(sorted(_GENERATION_OPTIONS))
        got = ", ".join(sorted(values.keys() - _GENERATION_OPTIONS))
        if got:
            raise ValueError(
                f"generation_kwargs: expected {expected}, got {got}; remove the others, which no decoder supports."
            )
        return SamplingParams(
            max_new_tokens=values["max_gen_toks"],
            # As transformers does for do_sample without a temperature.
            temperature=values.get("temperature", 1.0 if values["do_sample"] else 0.0),
            top_p=values.get("top_p", 1.0),
            top_k=values.get("top_k") or None,
            seed=values.get("seed", self.seed),
            stop=tuple(stop for stop in values["until"] if stop),
        )

    def _encode(self, context: str, text: str = "") -> list[int]:
        """Encode a context and a text after it.

        Special tokens are recognised only in the parts of a rendered chat that the template has written.
        """
        if not self._has_template:
            return self._encode_plain(context + text)
        tokenizer = self.model.tokenizer
        # The harness's cache may have a text that this object has not rendered; all names in it are tokens then.
        parts = self._rendered.get(context, [(context, True)])
        ids = encode_parts(tokenizer, [*parts, (text, False)] if text else parts, allow_unknown=True)
        return ids if starts_with_bos(ids, tokenizer) else self._add_special_tokens(ids)

    def _encode_plain(self, text: str) -> list[int]:
        return self._add_special_tokens(encode_text(self.model.tokenizer, text, allow_unknown=True))

    def _add_special_tokens(self, ids: list[int]) -> list[int]:
        """Add the tokenizer's special tokens around a text, EOS included, as the harness does."""
        before, after = find_added_tokens(self.model.tokenizer)
        return [*before, *ids, *after]

    def _split(self, context: str, text: str) -> tuple[list[int], list[int]]:
        """Return context tokens, never empty, and the tokens of the text after the context.

        As in the harness, the text's tokens are the tokens of the whole beyond the context's number of tokens.
        """
        if not context:
            return [self._start], encode_text(self.model.tokenizer, text, allow_unknown=True)
        kept = context.rstrip()  # spaces belong to the next word
        if context in self._rendered:
            self._rendered[kept] = _strip_end(self._rendered[context])
        before = self._encode(kept)
        whole = self._encode(kept, context[len(kept) :] + text)
        if len(whole) > len(before):
            return before or [self._start], whole[len(before) :]
        # The text joins the context's last token: the whole is scored from the first token that differs.
        same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        return whole[:same] or [self._start], whole[same:]

    @property
    def _start(self) -> int:
        """The token before a text without context: BOS, or EOS if there is no BOS, as in the harness."""
        bos = self.model.tokenizer.bos_token_id
        return self.model.backbone.special_tokens.eos_token_ids[0] if bos is None else int(bos)  # type: ignore[arg-type]

    def _windows(self, tokens: list[int]) -> list[tuple[list[int], list[int]]]:
        """Return pairs of known and scored tokens. Every pair fits into the context; together they score all tokens."""
        context = self.model.backbone.context(in_text_order=True)
        # A masked estimate reads the last token, too; an autoregressive model only predicts it.
        size = len(tokens) + 1 if context is None else context - (self.likelihood != "autoregressive")
        windows = get_rolling_token_windows(tokens, prefix_token=self._start, max_seq_len=size, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def _check_lengths(self, requests: list[Any], pairs: Sequence[tuple[list[int], list[int]]]) -> None:
        read = -1 if self.likelihood == "autoregressive" else 0  # the last token is only predicted
        names = _names(requests)
        lengths = [(len(known) + len(text) + read, name) for name, (known, text) in zip(names, pairs, strict=True)]
        check_context(self.model.backbone, lengths, 0)
        likelihood.check_likelihood(self.model.backbone, self.likelihood, allow_mismatch=self.allow_mismatch)

    def _loglikelihood(self, known: Sequence[int], text: Sequence[int]) -> tuple[float, bool]:
        if not text:
            return 0.0, True
        backbone = self.model.backbone
        if self.likelihood == "autoregressive":
            return likelihood.autoregressive(backbone, known, text)
        options = {"num_draws": self.num_draws, "batch_size": self.batch_size, "seed": self.seed}
        estimate = likelihood.monte_carlo_masked(backbone, known, text, **options)
        return estimate, likelihood.is_greedy_text(backbone, known, text)


def evaluate(model: RefusionLitModel, tasks: Sequence[Any], **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Run the harness's tasks, and add throughput to their scores.

    Args:
        model: The adapter.
        tasks: Task names or configs.
        options: Further options of ``lm_eval.simple_evaluate``.

    Returns:
        The harness's results, ``throughput`` by task (see :meth:`RefusionLitModel.throughput`), and ``refusion_lit``
        with the decoders that generated and the likelihood options.
    """
    model._has_template = bool(options.get("apply_chat_template"))  # also where the harness has rendered before
    results = simple_evaluate(model=model, tasks=list(tasks), **options)
    assert results is not None
    settings = {
        "decoders": [repr(decoder) for decoder in model.used_decoders],
        "batch_size": model.batch_size,
        "likelihood": model.likelihood,
        "num_draws": model.num_draws if model.likelihood == "monte_carlo_masked" else None,
    }
    return {**results, "throughput": model.throughput(), "refusion_lit": settings}


def _names(requests: Sequence[Any]) -> list[str]:
    """Name requests by task and document, and number repetitions; the names key the sampling noise."""
    seen: Counter[str] = Counter()
    names = []
    for request in requests:
        name = f"{request.task_name}/{request.doc_id}"
        names.append(f"{name}#{seen[name]}")
        seen[name] += 1
    return names


def _strip_end(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return the parts of a rendered chat without white space at the end of the text."""
    kept = list(parts)
    while kept and not kept[-1][0].strip():
        kept.pop()
    return [*kept[:-1], (kept[-1][0].rstrip(), kept[-1][1])] if kept else []
