"""Residual rules: how a branch's output joins the stream. One file for each rule."""

import importlib

from deeploop.config import ModelConfig
from deeploop.config.model import RESIDUALS
from deeploop.config.reasoner import Scales
from deeploop.model.residual.base import Residual

__all__ = ["Residual", "residual_rule"]


def residual_rule(config: ModelConfig, *scales: Scales) -> Residual:
    """Make the rule that `config.residual` names (`deeploop.config.model.RESIDUALS`).

    Args:
        config: of the model.
        scales: those of one module, of a rule for reasoners (`ResidualChoice.for_reasoners`).
    """
    module, _, name = RESIDUALS[config.residual].rule.partition(":")
    return getattr(importlib.import_module(module), name)(config, *scales)
