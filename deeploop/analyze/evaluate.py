"""Evaluate a run by number of loops: `deeploop eval RUN`.

`deeploop.eval.by_loop` and `deeploop.eval.path_independence` define the figures. Written are a
JSON file with those after every loop, and a picture of them.
"""

import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deeploop.analyze.diagnose.diagnose import output_folder
from deeploop.analyze.evaluate_reasoner import evaluate_reasoner
from deeploop.config import Config
from deeploop.config.fields import MAX_INT
from deeploop.config.loop_count import listed_loops
from deeploop.config.model import MODELS
from deeploop.data.source import Source
from deeploop.eval.by_loop import measure_by_loop
from deeploop.eval.generate import load_model
from deeploop.eval.path_independence import measure_starts
from deeploop.eval.validate import held_out_targets
from deeploop.model.memory import check_evaluation
from deeploop.runs import checkpoint
from deeploop.runs.folder import read_corpus_file
from deeploop.train.setup import check_same_corpus, read_corpus, resolve
from deeploop.utils.console import print_whole, say
from deeploop.utils.device import device_name, pick_device
from deeploop.utils.disk import user_path, write_json
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError

MOST_LINES = 16  # of a table whose loops were not given


def evaluate(
    run: str,
    console: Console,
    *,
    loops: str = "",
    tokens: int | None = None,
    batch_size: int = 0,
    data: str = "",
    difficulty: str = "",
    starts: int = 0,
    device: str = "auto",
    out: str = "",
) -> dict[str, Any]:
    """Measure a run after every loop up to a number of them; writes the results.

    Args:
        run: a run's folder or a checkpoint.
        console: prints the table.
        loops: lines of the table (`listed_loops`); empty: `default_loops`.
        tokens: held-out tokens to predict, 0: all; None: the run's train.eval_tokens.
        batch_size: sequences at once; 0: the run's micro-batch.
        data: a text or shards whose held-out part is read; empty: the run's corpus.
        difficulty: of a task's examples; empty: the run's data.eval_difficulty.
        starts: compare the states from so many starts; 0: none.
        device: auto, cpu, cuda or cuda:N.
        out: path of the files without their endings; empty: eval-STEP in the run's folder.

    Returns:
        What the JSON file has.

    Raises:
        InputError: the input cannot be evaluated; raised before anything is computed.
    """
    for name, value in (("tokens", tokens or 0), ("batch_size", batch_size), ("starts", starts)):
        if not 0 <= value <= MAX_INT:
            raise InputError(f"{name}={value}: must lie between 0 and {MAX_INT}")
    ckpt, torch_device = checkpoint.find(run), pick_device(device, "device")
    m, t = ckpt.config.model, ckpt.config.train
    tokens = t.eval_tokens if tokens is None else tokens
    batch_size = batch_size or t.micro_batch or t.batch_size
    path = output_path(ckpt, out)
    if MODELS[m.kind].puzzles:
        check_no_loops(loops=loops, difficulty=difficulty, starts=starts)
        return evaluate_reasoner(ckpt, console, path, tokens, batch_size, data, device)
    listed = listed_loops(loops, "loops") if loops else default_loops(m.loops)
    check_evaluation(m, torch_device, batch_size, max(listed))
    config, corpus = open_corpus(ckpt, data, difficulty, torch_device)
    with output_folder(path.parent, unique=False):
        model = load_model(ckpt, torch_device)
        for line in describe(ckpt, corpus, tokens, max(listed), torch_device):
            say(console, line)
        given = batch_size, config.train.precision, tokens
        figures = about(ckpt, corpus, tokens, torch_device) | {"table": listed}
        if starts:  # first, as it may refuse
            compared = measure_starts(model, corpus, listed, starts, *given)
            figures["starts"] = {"starts": starts, **compared}
        figures |= measure_by_loop(model, corpus, max(listed), *given)
        show(figures, console)
        write_results(path, figures, console)
    return figures


def check_no_loops(**options: Any) -> None:
    """Refuse options that are about loops or tasks, for a reasoner; raises InputError."""
    for name, value in options.items():
        if value:
            raise InputError(f"{name}={value}: a reasoner is measured by segments; leave it out")


def default_loops(trained: int) -> list[int]:
    """Return the loops up to twice those in training, or up to MOST_LINES of them."""
    step = math.ceil(2 * trained / (MOST_LINES - 3)) if 2 * trained > MOST_LINES else 1
    return sorted({1, trained, 2 * trained, *range(step, 2 * trained + 1, step)})


def open_corpus(
    ckpt: checkpoint.Checkpoint, data: str, difficulty: str, device: torch.device
) -> tuple[Config, Source]:
    """Load the run's corpus, or other data with its tokenizer; returns the configuration, too."""
    config = ckpt.config.replace("train", device=str(device), compile=False)
    if data:
        spec = read_corpus_file(ckpt.described_in).get("tokenizer") or config.data.tokenizer
        file = ckpt.described_in / spec
        spec = str(file.resolve()) if file.is_file() else spec
        config = config.replace("data", path=data, tokenizer=spec)
    if difficulty:
        config = config.replace("data", eval_difficulty=difficulty)
    corpus = read_corpus(config)
    if not data and not difficulty:
        check_same_corpus(corpus, ckpt)
    if corpus.held_out_targets < 1:
        raise InputError(
            f"data.path={config.data.path!r}: has no held-out text; give --data with some"
        )
    return resolve(config, corpus, Ranks()), corpus


def output_path(ckpt: checkpoint.Checkpoint, out: str) -> Path:
    """Return the path of the files to write, without their endings."""
    path = user_path(out, "out") if out else ckpt.run or ckpt.path
    if path.is_dir():
        return path / f"eval-step_{ckpt.step:06d}"
    return path.with_suffix("") if path.suffix in (".json", ".png") else path


def describe(
    ckpt: checkpoint.Checkpoint, corpus: Source, tokens: int, loops: int, device: torch.device
) -> list[str]:
    """Return lines with the model, the data and the work."""
    c, m = ckpt.config, ckpt.config.model
    return [
        f"model    {c.preset}: {m.residual}, {m.n_layers} blocks x {m.loops} loops, width "
        f"{m.d_model}, step {ckpt.step}",
        f"data     {corpus.describe()}",
        f"measures {held_out_targets(corpus, tokens):,} held-out tokens through {loops} loops on "
        f"{device_name(device)}",
    ]


def about(
    ckpt: checkpoint.Checkpoint, corpus: Source, tokens: int, device: torch.device
) -> dict[str, Any]:
    """Return what a file says of the run that was measured."""
    c = ckpt.config
    return {
        "checkpoint": str(ckpt.path),
        "preset": c.preset,
        "step": ckpt.step,
        "residual": c.model.residual,
        "depth": c.model.depth,
        "trained_loops": c.model.loops,
        "data": corpus.name,
        "tokens": held_out_targets(corpus, tokens),
        "precision": c.train.precision,
        "device": device_name(device),
        "torch": torch.__version__,
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the tables, and what the depth rule says."""
    print_whole(console, table(figures))
    print_whole(console, exits_table(figures))
    for line in of_the_rule(figures):
        say(console, line)


def table(figures: dict[str, Any]) -> Table:
    """Make a table with a row for each listed number of loops."""
    columns = {
        "loss": (figures["loss"], ".4f"),
        "bits/byte": (figures["bits_per_byte"], ".4f"),
        "right": (figures["right"], ".2%"),
        "exact": (figures.get("exact"), ".2%"),
        "change": (figures["change"], ".4f"),
        "KL": (figures["kl"], ".2e"),
        "entropy": (figures["entropy"], ".3f"),
        "switched": (figures["switched"], ".2%"),
        "exit": (figures.get("gate", {}).get("p"), ".3f"),
    }
    columns |= {
        name: (by_loop(figures.get("starts"), key), ".4f")
        for name, key in (("cosine", "cosine"), ("distance", "distance"), ("spread", "loss_spread"))
    }
    shown = {name: column for name, column in columns.items() if column[0] is not None}
    rows = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("loops", *shown):
        rows.add_column(name, justify="right", no_wrap=True)
    for t in figures["table"]:
        number = f"trained {t}" if t == figures["trained_loops"] else str(t)
        rows.add_row(number, *(written(values[t - 1], form) for values, form in shown.values()))
    return rows


def by_loop(starts: dict[str, Any] | None, key: str) -> list[float] | None:
    """Return the values of some loops as a list with one for each loop, NaN for the others."""
    if starts is None:
        return None
    values = dict(zip(starts["loops"], starts[key], strict=True))
    return [values.get(t, math.nan) for t in range(1, max(values) + 1)]


def exits_table(figures: dict[str, Any]) -> Table:
    """Make a table with a row for each rule by which tokens could leave."""
    rows = Table(box=None, padding=(0, 2, 0, 0))
    rows.add_column("leaving by", no_wrap=True)
    for name in ("mean loops", "loss there", "left early"):
        rows.add_column(name, justify="right", no_wrap=True)
    for e in figures["exits"]:
        rows.add_row(
            e["rule"], written(e["loops"], ".2f"), written(e["loss"], ".4f"),
            written(e["left"], ".1%"),
        )  # fmt: skip
    return rows


def of_the_rule(figures: dict[str, Any]) -> list[str]:
    """Return lines with the figures of a depth rule that has exits or chooses tokens."""
    lines = []
    if gate := figures.get("gate"):
        lines.append(
            f"gate     expected: {gate['expected_loop']:.2f} loops and a loss of "
            f"{gate['expected_loss']:.4f}"
        )
    if taken := figures.get("loops_taken"):
        shares = (f"{t}: {x:.1%}" for t, x in enumerate(taken["shares"]) if x)
        lines.append(f"depth    tokens took {taken['mean']:.2f} loops ({', '.join(shares)})")
    return lines


def written(value: float, form: str) -> str:
    """Format a number; - for one that is not finite."""
    return format(value, form) if math.isfinite(value) else "-"


def write_results(path: Path, figures: dict[str, Any], console: Console) -> None:
    """Write PATH.json and PATH.png, and say so."""
    write_json(path.with_name(f"{path.name}.json"), figures)
    from deeploop.analyze import plots  # matplotlib is slow to import

    plots.by_loop(figures, path.with_name(f"{path.name}.png"))
    say(console, f"wrote    {path}.json and {path.name}.png")
