"""The loss with a teacher: the text's cross-entropy and KL(teacher || model), after the last loop.

The teacher runs without gradient, in the run's precision (`deeploop.model.distillation`).
"""

import torch
from torch import Tensor

from deeploop.config import TrainConfig
from deeploop.model.distillation import distillation_loss
from deeploop.model.looplm import LoopLM
from deeploop.train.losses.base import LoopEnds, Loss, LossTerms


class Distilled(Loss):
    """(1 - w) cross-entropy + w KL(teacher || model), w = train.teacher_weight."""

    each_loop = False

    def __init__(self, config: TrainConfig, teacher: LoopLM):
        super().__init__(config)
        self.teacher = teacher

    def __call__(self, ends: LoopEnds, targets: Tensor, chunk_rows: int | None) -> LossTerms:
        with torch.no_grad():
            taught = self.teacher(ends.tokens)
        total, cross_entropy, divergence = distillation_loss(
            ends.states[-1], ends.model.head, targets, taught, self.teacher.head,
            self.config.teacher_weight, chunk_rows,
        )  # fmt: skip
        return LossTerms(total, cross_entropy, {"teacher_divergence": divergence})
