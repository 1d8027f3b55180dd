"""Peak memory of a training step by backprop plan and loops, counted with fake tensors.

    python -m bench.experiments.memory loom-329m

prints GiB as a Markdown table: weights, gradients, moments and activations of a step of
one micro-batch, from the second step on (see `deeploop.analyze.plan.planner`). Needs no GPU and does
not allocate the model.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from deeploop.analyze.plan.planner import count, target_of
from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.utils.errors import InputError

PLANS: dict[str, dict[str, Any]] = {
    "`segments`, 3 loops": {"plan": "segments", "backprop_loops": 3},
    "`last`, 3 loops": {"plan": "last", "backprop_loops": 3},
    "`full`": {"plan": "full"},
    "`full`, `--train.recompute visit`": {"plan": "full", "recompute": "visit"},
    "`full`, `--train.recompute loop`": {"plan": "full", "recompute": "loop"},
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


def cell(config: Config, plan: dict[str, Any], loops: int) -> float:
    """Bytes of one plan at one number of loops on a GPU, in bfloat16, of one micro-batch."""
    vocab, rows = config.model.vocab_size or 256, config.train.batch_size
    config = config.replace("model", loops=loops, vocab_size=vocab)
    config = config.replace("train", precision="bf16", **plan)
    return count(config, target_of("h200"), timed=False).held(rows).peak


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    try:
        config = preset(a.name)
    except InputError as error:
        sys.exit(f"memory: {error}")
    rows = a.micro_batch or config.train.micro_batch or config.train.batch_size
    config = config.replace("train", micro_batch=rows, batch_size=rows)
    print(f"{a.name}, {rows} x {config.model.seq_len} tokens, bfloat16 autocast, GiB\n")
    print(f"| plan | {' | '.join(f'H = {h}' for h in a.loops)} |")
    print("|---|" + "---|" * len(a.loops))
    found: dict[str, list[float]] = {}
    for name, plan in PLANS.items():
        found[name] = [cell(config, plan, h) for h in a.loops]
        print(f"| {name} | {' | '.join(f'{b / 2**30:.2f}' for b in found[name])} |", flush=True)
    if a.out is not None:
        a.out.write_text(json.dumps({"preset": a.name, "loops": a.loops, "bytes": found}) + "\n")


if __name__ == "__main__":
    main()
