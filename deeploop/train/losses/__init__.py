"""Losses of a step: after which loops the head predicts, and what weighs it. See `base`."""

import importlib

from deeploop.config import TrainConfig
from deeploop.config.train import LOSSES
from deeploop.model.looplm import LoopLM
from deeploop.train.losses.base import Loss
from deeploop.train.losses.distilled import Distilled

__all__ = ["Loss", "loss_rule"]


def loss_rule(config: TrainConfig, teacher: LoopLM | None = None) -> Loss:
    """Make the loss that `config.loss` names (`deeploop.config.train.LOSSES`), or a teacher's."""
    if teacher is not None:
        return Distilled(config, teacher)
    module, _, name = LOSSES[config.loss].loss.partition(":")
    return getattr(importlib.import_module(module), name)(config)
