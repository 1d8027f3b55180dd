"""Peak memory of a training step by backprop and loops, counted with fake tensors.

    python -m bench.experiments.memory loom-329m

prints GiB as a Markdown table: weights, gradients, moments and activations of a step of one
micro-batch, from the second step on (see `deeploop.analyze.plan.planner`). Needs no GPU and
does not allocate the model; loom-329m takes about a minute.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.harness.markdown import markdown_table
from deeploop.analyze.plan.planner import count, target_of
from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.utils.errors import InputError

SETTINGS: dict[str, dict[str, Any]] = {
    "`segments`, 3 loops": {"backprop": "segments", "backprop_loops": 3},
    "`last`, 3 loops": {"backprop": "last", "backprop_loops": 3},
    "`full`": {"backprop": "full"},
    "`full`, `--train.recompute visit`": {"backprop": "full", "recompute": "visit"},
    "`full`, `--train.recompute loop`": {"backprop": "full", "recompute": "loop"},
}


@dataclasses.dataclass
class Arguments:
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRESET")]
    loops: tuple[int, ...] = (3, 6, 9, 12)
    """Loop counts, a column each."""
    micro_batch: int = 0
    """Sequences of a micro-batch; 0: the preset's."""
    out: Path | None = None
    """JSON of the table, in bytes."""


def peak_bytes(config: Config, setting: dict[str, Any], loops: int) -> float:
    """Count the peak of a step on a GPU in bfloat16, the batch as one micro-batch."""
    config = config.replace("model", loops=loops, vocab_size=config.model.vocab_size or 256)
    config = config.replace("train", precision="bf16", **setting)
    return count(config, target_of("h200"), timed=False).memory(config.train.batch_size).peak


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    try:
        config = preset(a.name)
    except InputError as error:
        sys.exit(f"memory: {error}")
    sequences = a.micro_batch or config.train.micro_batch or config.train.batch_size
    config = config.replace("train", micro_batch=sequences, batch_size=sequences)
    peaks = {
        name: [peak_bytes(config, setting, loops) for loops in a.loops]
        for name, setting in SETTINGS.items()
    }
    rows = [[name, *(f"{b / 2**30:.2f}" for b in row)] for name, row in peaks.items()]
    print(f"{a.name}, {sequences} x {config.model.seq_len} tokens, bfloat16 autocast, GiB\n")
    print(markdown_table(["backprop", *(f"H = {h}" for h in a.loops)], rows, text_columns=1))
    if a.out is not None:
        a.out.write_text(json.dumps({"preset": a.name, "loops": a.loops, "bytes": peaks}) + "\n")


if __name__ == "__main__":
    main()
