"""Sources of an optimizer step's responses: the data, or a subclass that generates them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L

from refusion_lit.evaluation.loop import Evaluation
from refusion_lit.learning.batch import CorruptedBatch
from refusion_lit.learning.objective import Objective
from refusion_lit.learning.step import OptimizerStep


class StepSource(L.Callback):
    """Callback that makes the corrupted micro-batches for an optimizer step, by default from the data.

    If an objective trains on other responses, such as roll-outs, its class attribute ``step_source`` names a subclass.
    The subclass saves and restores its state in callback hooks.

    Args:
        objective: The training objective.
        evaluation: The module's decoders, sampling and decoding options.
        seed: The module's seed.

    Attributes:
        shown: Names of figures for the progress bar.
        figures: The last step's figures on this process, by name; logged with the loss.
    """

    shown: ClassVar[tuple[str, ...]] = ()
    figures: Mapping[str, float] = {}

    def __init__(self, objective: Objective, evaluation: Evaluation, seed: int) -> None:
        self.objective = objective
        self.evaluation = evaluation
        self.seed = seed

    def start(self, module: Any) -> None:  # noqa: ANN401 - training.module, which imports this file
        """Check options before training.

        Raises:
            ValueError: If an option is impossible.
        """

    def corrupt(self, module: Any, step: OptimizerStep) -> list[CorruptedBatch]:  # noqa: ANN401 - likewise
        """Return a step's corrupted micro-batches, in order.

        Args:
            module: The module; ``module.corrupt`` corrupts a batch with the samples' noise.
            step: The clean micro-batches.
        """
        return [module.corrupt(batch) for batch in step.batches]
