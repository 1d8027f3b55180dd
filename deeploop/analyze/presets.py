"""List the named configurations: `deeploop presets`."""

import dataclasses

import torch
from rich.table import Table

from deeploop.config import Config, ModelConfig
from deeploop.config.model import MODELS
from deeploop.config.presets import PAPERS, presets
from deeploop.data.tasks import load_task
from deeploop.model.memory import parameters
from deeploop.model.reasoner import Reasoner

DEFAULT_VOCABULARY = 256  # of the byte tokenizer, where a preset leaves it to the corpus


def table(variants: bool) -> Table:
    """Make a table with a row for each preset; with `variants` also for changes of a preset."""
    rows = Table(box=None, pad_edge=False)
    for name in ("preset", "paper"):
        rows.add_column(name, no_wrap=True)
    for name in ("parameters", "loops"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("model and training", no_wrap=True)
    named = presets()
    for name, config in named.items():
        changed = any(name.startswith(f"{other}-") for other in named)
        if changed and not variants and not name.endswith("-tiny"):
            continue
        paper = next((paper for start, paper in PAPERS.items() if name.startswith(start)), "")
        loops = str(config.model.loops)
        if MODELS[config.model.kind].puzzles:
            loops = str(config.model.reasoner.segments)
        rows.add_row(name, paper, size(config), loops, summary(config))
    return rows


def size(config: Config) -> str:
    """Return the parameters in millions, without gains."""
    m = config.model
    if not m.vocab_size:
        ids = load_task(config.data.task).vocab_size if config.data.task else DEFAULT_VOCABULARY
        m = config.replace("model", vocab_size=ids).model
    millions = (count(m) if MODELS[m.kind].puzzles else parameters(m)) / 1e6
    return f"{millions:.3g} M" if millions < 100 else f"{millions:,.0f} M"


def count(m: ModelConfig) -> int:
    """Count the parameters of a reasoner, without its puzzle embedding."""
    with torch.device("meta"):
        model = Reasoner(
            dataclasses.replace(m, reasoner=dataclasses.replace(m.reasoner, puzzles=1))
        )
    return sum(p.numel() for p in model.parameters())


def summary(config: Config) -> str:
    """Return the sizes of the model and of its training in one line."""
    m, t = config.model, config.train
    if MODELS[m.kind].puzzles:
        r = m.reasoner
        blocks = f"{r.layers_low}" if r.shared else f"{r.layers_low} + {r.layers_high}"
        passes = f"{r.cycles_high} x ({r.cycles_low} + 1) passes"
        sizes = f"{t.steps:,} steps of {t.batch_size} x {m.seq_len} cells"
        return f"{blocks} blocks, {r.mixer}, width {m.d_model}, {passes}; {sizes}"
    experts = f", {m.moe.top_k} of {m.moe.experts} experts" if m.moe.experts else ""
    return (
        f"{m.residual}, {m.n_layers} blocks, width {m.d_model}{experts}; "
        f"{t.steps:,} steps of {t.batch_size} x {m.seq_len} tokens"
    )
