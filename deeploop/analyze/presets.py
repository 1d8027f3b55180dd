"""List the named configurations: `deeploop presets`."""

from rich.table import Table

from deeploop.config import Config
from deeploop.config.presets import PAPERS, presets
from deeploop.model.memory import parameters

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
        if not variants and any(name.startswith(f"{other}-") for other in named):
            continue
        paper = next((paper for start, paper in PAPERS.items() if name.startswith(start)), "")
        rows.add_row(name, paper, size(config), str(config.model.loops), summary(config))
    return rows


def size(config: Config) -> str:
    """Return the parameters in millions, without gains."""
    m = config.model
    if not m.vocab_size:
        m = config.replace("model", vocab_size=DEFAULT_VOCABULARY).model
    millions = parameters(m) / 1e6
    return f"{millions:.3g} M" if millions < 100 else f"{millions:,.0f} M"


def summary(config: Config) -> str:
    """Return the sizes of the model and of its training in one line."""
    m, t = config.model, config.train
    experts = f", {m.moe.top_k} of {m.moe.experts} experts" if m.moe.experts else ""
    return (
        f"{m.residual}, {m.n_layers} blocks, width {m.d_model}{experts}; "
        f"{t.steps:,} steps of {t.batch_size} x {m.seq_len} tokens"
    )
