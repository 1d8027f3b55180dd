"""Refuse a configuration that the machine's memory cannot hold."""

import dataclasses

from deeploop.config import Config
from deeploop.model.flops import block_weights, dense_block_weights
from deeploop.utils.device import host_memory
from deeploop.utils.errors import InputError


def check_memory(config: Config) -> None:
    """Refuse a step on a CPU that needs more memory than the machine has; raises InputError.

    Counting a step takes a second (`deeploop.analyze.plan.planner`), so models with less than
    1% of the memory in weights are let through. Weights that do not fit by themselves are
    refused where they are allocated.
    """
    if config.train.device != "cpu":
        return
    m, t, available = config.model, config.train, host_memory()
    all_experts = dataclasses.replace(m, moe=dataclasses.replace(m.moe, top_k=m.moe.experts))
    blocks = m.n_layers * block_weights(all_experts) + (m.prelude + m.coda) * dense_block_weights(m)
    weights = 4 * (m.vocab_size * m.d_model + blocks)
    if not available / 100 < weights < available or config.model.moe.backend != "grouped_mm":
        return
    # Importing it takes half a second, which most runs need not wait.
    from deeploop.analyze.plan.planner import counted_peak

    sequences = t.micro_batch or t.batch_size
    needed = counted_peak(config.replace("train", compile=False), sequences)
    if needed > available:
        raise InputError(
            f"train.micro_batch={sequences}: a step would hold {needed / 2**30:.0f} GiB and this "
            f"machine has {available / 2**30:.0f}; lower it, or train on a GPU (see deeploop plan)"
        )
