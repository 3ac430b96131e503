"""Where the responses of an optimizer step come from: the data, or answers that a subclass makes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import lightning as L

from refusion_lit.evaluation.loop import Evaluation
from refusion_lit.learning.batch import CorruptedBatch
from refusion_lit.learning.objective import Objective
from refusion_lit.learning.step import OptimizerStep


class StepSource(L.Callback):
    """Callback that makes the corrupted micro-batches of an optimizer step, by default from the data.

    An objective that trains on other responses, such as roll-outs, names a subclass in its class attribute
    ``step_source``. The callback hooks of the subclass save and restore its state.

    Args:
        objective: The training objective.
        evaluation: Decoders, sampling and decoding options of the module.
        seed: The module's seed.

    Attributes:
        shown: Names of figures for the progress bar.
        figures: Figures of the last step on this process, by name; logged with the loss.
    """

    shown: ClassVar[tuple[str, ...]] = ()
    figures: Mapping[str, float] = {}

    def __init__(self, objective: Objective, evaluation: Evaluation, seed: int) -> None:
        self.objective = objective
        self.evaluation = evaluation
        self.seed = seed

    def start(self, module: Any) -> None:  # noqa: ANN401 - training.module, which imports this file
        """Check before training that steps can be made.

        Raises:
            ValueError: If an option is impossible.
        """

    def corrupt(self, module: Any, step: OptimizerStep) -> list[CorruptedBatch]:  # noqa: ANN401 - likewise
        """Return the corrupted micro-batches of a step, in order.

        Args:
            module: The module; ``module.corrupt`` corrupts a batch with the noise of the samples.
            step: The clean micro-batches.
        """
        return [module.corrupt(batch) for batch in step.batches]


def make_step_source(objective: Objective, evaluation: Evaluation, seed: int) -> StepSource:
    """Build the step source that the objective names by import path, or the default step source."""
    cls: Any = StepSource
    if objective.step_source is not None:
        module, _, name = objective.step_source.rpartition(".")
        cls = getattr(import_module(module), name)
    return cls(objective, evaluation, seed)
