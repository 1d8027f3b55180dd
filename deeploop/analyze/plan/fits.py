"""Refuse a configuration that the machine's memory cannot hold."""

import dataclasses

from deeploop.config import Config
from deeploop.model.flops import block_weights
from deeploop.utils.device import host_memory
from deeploop.utils.errors import InputError


def check_memory(config: Config) -> None:
    """Refuse a step on a CPU that the whole machine could not hold.

    Asked of models that could: to be counted (see `deeploop.analyze.plan.planner`) costs a second. Weights
    that are too large by themselves are refused where they are made.
    """
    if config.train.device != "cpu":
        return
    m, t, there = config.model, config.train, host_memory()
    every = dataclasses.replace(m, moe=dataclasses.replace(m.moe, top_k=m.moe.experts))
    weights = 4 * (m.vocab_size * m.d_model + m.n_layers * block_weights(every))
    if not there / 100 < weights < there or config.model.moe.backend != "grouped_mm":
        return
    from deeploop.analyze.plan.planner import (
        counted_peak,  # half a second that few runs need to wait
    )

    rows = t.micro_batch or t.batch_size
    needed = counted_peak(config.replace("train", compile=False), rows)
    if needed > there:
        raise InputError(
            f"train.micro_batch={rows}: a step would hold {needed / 2**30:.0f} GiB and this "
            f"machine has {there / 2**30:.0f}; lower it, or train on a GPU (see deeploop plan)"
        )
