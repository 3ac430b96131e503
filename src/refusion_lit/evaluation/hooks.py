"""The test and predict hooks of the LightningModule: compare decoders, write predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from transformers import PreTrainedTokenizerBase

from refusion_lit.api import TextModel, load
from refusion_lit.data.evaluation import collate_prompts
from refusion_lit.decoding import Decoder, check_prompts
from refusion_lit.evaluation.fingerprints import described
from refusion_lit.evaluation.loop import DecodingSetup, Evaluation
from refusion_lit.evaluation.options import DecodingOptions
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.modeling.weights import gather
from refusion_lit.reports.results import write_results
from refusion_lit.reports.tables import decoder_table
from refusion_lit.reports.write import write_test_report
from refusion_lit.types import PromptBatch, SamplingParams


class EvaluationHooks(L.LightningModule):
    """Tests named decoders and writes predictions; the subclass builds the model and sets the options.

    Attributes:
        results: Figures of the last test by decoder name.
        mismatches: Reasons why a tested decoder does not fit the model, by decoder name.
    """

    backbone_config: BackboneConfig
    tokenizer: PreTrainedTokenizerBase | None
    sampling: SamplingParams
    decoding: DecodingOptions
    prompt_template: str
    seed: int
    resume: bool

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, dict[str, float]] = {}
        self.mismatches: dict[str, list[str]] = {}
        self._evaluation: Evaluation | None = None
        self._verifiers: list[TextModel] = []  # in a list, so that its weights are not taken for this module's

    @property
    def decoders(self) -> dict[str, Decoder]:
        """The decoders by name."""
        raise NotImplementedError

    @property
    def model(self) -> Backbone:
        """The backbone."""
        raise NotImplementedError

    def text_model(self) -> TextModel:
        """Return the model with the Python interface for generation."""
        self.configure_model()
        assert self.tokenizer is not None
        model = TextModel(self.model, self.tokenizer, self.prompt_template)
        if self._verifiers:
            model.pair_with(self._verifiers[0])
        return model

    def _load_verifier(self) -> None:
        """Load the second model that decoders such as APD need, on the first one's device."""
        if self.decoding.verifier is not None and not self._verifiers:
            self._verifiers.append(load(self.decoding.verifier, device=self.model.device))

    def on_test_start(self) -> None:
        """Check every decoder against the model before any work, and open the predictions files."""
        self._load_verifier()
        model, allow = self.text_model(), self.decoding.allow_mismatch
        self.mismatches = {
            name: model.check_decoder(decoder, allow_mismatch=allow) for name, decoder in self.decoders.items()
        }
        self._evaluation = self._start(self.decoders, "predictions_{}.jsonl", counted=True)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Decode a batch of prompts with every decoder."""
        self._running.step(batch)

    def on_test_epoch_end(self) -> None:
        """Print the table of decoders and write the results."""
        self.results = self._running.figures()
        for name, figures in self.results.items():
            for figure, value in figures.items():
                self.log(f"test/{name}/{figure}", float(value))
        self._running.merge(self.trainer.strategy)
        if self.trainer.is_global_zero:
            decoder_table(self.results, self.batch_size, marked={n for n, why in self.mismatches.items() if why})
            write_test_report(write_results(self._running.directory, self._summary(), seed=self.seed))
        self._running.complete()

    def _summary(self) -> dict[str, Any]:
        return {
            "sampling": asdict(self.sampling),
            "max_batch_size": self.decoding.max_batch_size,
            "batch_size": self.batch_size,
            "max_tokens_per_forward": self.decoding.max_tokens_per_forward,
            "max_cache_tokens": self.decoding.max_cache_tokens,
            "share_prefixes": self.decoding.share_prefixes,
            "verifier": self.decoding.verifier,
            "decoders": {name: described(decoder) for name, decoder in self.decoders.items()},
            "fingerprints": self._running.fingerprints,
            "results": self.results,
            "mismatches": self.mismatches,
        }

    def on_predict_start(self) -> None:
        """Check the decoder and open the predictions file."""
        self._load_verifier()
        name, decoder = next(iter(self.decoders.items()))
        self.text_model().check_decoder(decoder, allow_mismatch=self.decoding.allow_mismatch)
        self._evaluation = self._start({name: decoder}, "predictions.jsonl", counted=False)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Decode a batch with the first decoder; write and return its predictions."""
        return self._running.step(batch)

    def on_predict_end(self) -> None:
        """Close the predictions file."""
        self._running.merge(self.trainer.strategy)
        self._running.complete()

    @property
    def _running(self) -> Evaluation:
        assert self._evaluation is not None, "no test or prediction has been started"
        return self._evaluation

    def decoding_setup(self) -> DecodingSetup:
        """Return what decodes prompts in test, prediction and logged samples."""
        self._load_verifier()
        return DecodingSetup(model=self.text_model(), sampling=self.sampling, options=self.decoding)

    def _start(self, decoders: Mapping[str, Decoder], file_name: str, *, counted: bool) -> Evaluation:
        """Open the predictions files, if all prompts fit the model."""
        gather(self.model)
        data: Any = getattr(self.trainer, "datamodule", None)
        prompts = data.test_prompts() if data else []
        contents = {
            prompt.example.id: (list(prompt.prompt_ids), prompt.example.response, *filter(None, [prompt.given]))
            for prompt in prompts
        }
        encoded = collate_prompts(prompts).prompts
        model = self.text_model()
        for decoder in decoders.values():
            check_prompts(model.model_for(decoder), decoder, encoded, self.sampling, self.decoding.max_cache_tokens)
        return Evaluation(
            self.decoding_setup(),
            decoders,
            data.task,
            contents,
            self.output_directory,  # on every process: asking for it waits for all of them
            file_name=file_name,
            counted_on=self.device if counted else None,
            rank=self.trainer.global_rank,
            num_ranks=self.trainer.world_size,
            resume=self.resume,
            watch=getattr(self.trainer.progress_bar_callback, "watch", None),
        )

    @property
    def output_directory(self) -> Path:
        """Where results go: the first logger's directory."""
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

    @property
    def batch_size(self) -> int:
        """Maximum number of prompts that share a call in a test, limited by the loader's batches."""
        module = getattr(self.trainer, "datamodule", None)
        limit = self.decoding.max_batch_size
        return min(limit, getattr(module, "eval_batch_size", limit))
