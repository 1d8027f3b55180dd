"""What sharing weights over loops does to a model: `deeploop diagnose RUN|PRESET`.

A preset is diagnosed as it begins; a run there and at each checkpoint it kept, all on one
held-out batch, in float32, under full backprop whatever the plan of the run. Written are
diagnose.json and diagnose.png. `deeploop.analyze.diagnose.per_loop` says what kappa_R stands on,
`deeploop.analyze.diagnose.diagnostics` what else is measured.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from deeploop.analyze.diagnose.diagnostics import Batch, Measured, as_figures, measure_state
from deeploop.analyze.plan.memory import LiveBytes
from deeploop.config import Config
from deeploop.config.fields import MAX_SEED
from deeploop.data.batches import train_batch, windows_per_epoch
from deeploop.data.corpus import Corpus
from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.runs.folder import choose_run_folder
from deeploop.train.optim import adamw
from deeploop.train.setup import check_same, check_same_corpus, read_corpus, resolve
from deeploop.utils.console import print_whole
from deeploop.utils.device import device_name
from deeploop.utils.disk import disk_errors, user_path, write_json
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import Diverged, InputError


def diagnose(
    config: Config,
    found: list[checkpoint.Checkpoint],
    console: Console,
    *,
    probes: int = 4,
    batch_size: int = 0,
    draw: int = 0,
) -> list[dict[str, Any]]:
    """Diagnose a preset as it begins, or a run's checkpoints; returns what diagnose.json holds.

    batch_size sequences (0: the run's micro-batch, or all held-out ones where they are
    fewer) and `probes` probes are drawn by `draw`. Raises InputError for what cannot be
    diagnosed, before anything is computed, and Diverged where a figure is not finite;
    nothing is written then.
    """
    for name, value, least in (("probes", probes, 1), ("batch_size", batch_size, 0)):
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")
    if not 0 <= draw <= MAX_SEED:
        raise InputError(f"draw={draw}: must be from 0 to {MAX_SEED}")
    corpus = read_corpus(config)
    for saved in found:
        check_same(config, saved)
        check_same_corpus(corpus, saved)
    config = exact(config, corpus)
    batch = draw_batch(corpus, config, batch_size, probes, draw)
    folder = destination(config, found)
    readings = []
    with made(folder):
        for line in describe(config, batch):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        for step, model, optimizer in states(config, found):
            measured = measure_state(model, optimizer, config, step, batch)
            check_finite(measured, step)
            readings.append(as_figures(measured, config, step))
        print_whole(console, table(readings))
        write(folder, config, batch, readings)
    console.print(
        f"wrote    {folder}/diagnose.json and diagnose.png",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return readings


def destination(config: Config, found: list[checkpoint.Checkpoint]) -> Path:
    """train.out, else the run's own folder, else a new one."""
    if config.train.out:
        return user_path(config.train.out, "train.out")
    return found[0].run if found else choose_run_folder(config)


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """A folder to write to at the end, tried at once; a new one goes if nothing came of it."""
    new = not folder.exists()
    try:
        with disk_errors(f"folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        yield
    except BaseException:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def check_finite(m: Measured, step: int) -> None:
    """Refuse figures that would say nothing, and that JSON has no number for."""
    if not all(x.isfinite().all() for x in (m.loss, m.stream, m.g, m.u, m.moved)):
        raise Diverged(
            f"the loss, a gradient or the stream at step {step} is not finite on this batch, "
            "so that there is nothing to diagnose; nothing was written"
        )


def checkpoints(path: str) -> list[checkpoint.Checkpoint]:
    """The checkpoint at `path`, or all that the run there has kept, oldest first."""
    found = checkpoint.find(path)
    if user_path(path, "run").resolve() == found.path.resolve():
        return [found]
    return [checkpoint.find(str(step)) for step in checkpoint.steps(found.run)]


def states(
    config: Config, found: list[checkpoint.Checkpoint]
) -> Iterator[tuple[int, LoopLM, torch.optim.AdamW]]:
    """(step, model, optimizer) of the model as training begins, and of each checkpoint."""
    for saved in (None, *found):
        torch.manual_seed(config.train.seed)
        model = LoopLM(config.model).to(config.train.device)
        optimizer = adamw(model, config.train)
        if saved is not None:
            checkpoint.load_model(saved, model)
            checkpoint.load_optimizer(saved, optimizer)
        yield 0 if saved is None else saved.step, model, optimizer


def draw_batch(corpus: Corpus, config: Config, size: int, probes: int, seed: int) -> Batch:
    """Held-out sequences, none twice, drawn by the seed alone; size 0: see `diagnose`."""
    length, t = config.model.seq_len, config.train
    if len(corpus.val) <= length:
        raise InputError(
            f"data.path={config.data.path!r}: {len(corpus.val)} held-out tokens are fewer than "
            f"one sequence and its target ({length + 1}); give more text or a larger "
            "data.val_fraction"
        )
    most = windows_per_epoch(len(corpus.val), length)
    if size > most:
        raise InputError(
            f"batch_size={size}: the held-out text has {most} sequences of {length} tokens; "
            "give at most that"
        )
    rows = size or min(t.micro_batch or t.batch_size, most)
    tokens, targets = train_batch(
        corpus.val, seed=seed, step=0, global_batch=rows, seq_len=length, rows=range(rows)
    )
    return Batch(tokens.to(t.device), targets.to(t.device), probes, seed)


def exact(config: Config, corpus: Corpus) -> Config:
    """The run's configuration in float32 and eager; megablocks' experts by the plain loop."""
    config = config.replace("train", precision="fp32", compile=False)
    if config.model.moe.backend == "megablocks":
        config = config.replace("model.moe", backend="loop")
    return resolve(config, corpus, Ranks())


def describe(config: Config, batch: Batch) -> list[str]:
    """What is diagnosed, on what, and what it takes."""
    m, t = config.model, config.train
    rows, length = batch.tokens.shape
    size = peak(config, rows) / 2**30
    plan = "" if t.backprop == "full" else f" (the run trains under {t.backprop})"
    return [
        f"model    {config.preset}: {m.residual}, {m.n_layers} blocks x {m.loops} loops, width "
        f"{m.d_model}",
        f"batch    {rows} x {length} held-out tokens; gradients: full backprop, float32{plan}",
        f"cost     {1 + batch.probes} backwards and 2 forwards a checkpoint, {size:.2f} GiB "
        f"(counted) on {device_name(batch.tokens.device)}",
    ]


def peak(config: Config, rows: int) -> int:
    """Bytes that a diagnosis of `rows` sequences holds at once, counted; none allocated."""
    with FakeTensorMode(allow_non_fake_inputs=False), LiveBytes() as live:
        model = LoopLM(config.model)
        tokens = torch.zeros(rows, config.model.seq_len, dtype=torch.int64)
        measure_state(model, adamw(model, config.train), config, 0, Batch(tokens, tokens, 1, 0))
        return live.peak


def table(readings: list[dict[str, Any]]) -> Table:
    """A row for each state."""
    rows = Table(box=None, padding=(0, 1, 0, 0))
    names = ("step", "loss", "kappa", "gamma", "p", "direct.", "cosine", "rms", "moved", "/bound")
    for name in names:
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("largest at", no_wrap=True)
    for r in readings:
        values = (
            r["kappa"], r["gamma"], r["p"], r["kappa_directional"], r["cosine"], r["rms"][-1][-1],
        )  # fmt: skip
        of_bound = r["update"]["measured_over_bound"]
        rows.add_row(
            str(r["step"]),
            f"{r['loss']:.3f}",
            *("-" if x is None else f"{x:.2f}" for x in values),
            f"{r['update']['measured']:.1e}",
            "-" if of_bound is None else f"{of_bound:.3f}",
            r["sublayer"],
        )
    return rows


def write(folder: Path, config: Config, batch: Batch, readings: list[dict[str, Any]]) -> None:
    """diagnose.json and diagnose.png."""
    rows, length = batch.tokens.shape
    about = {
        "preset": config.preset,
        "residual": config.model.residual,
        "n_layers": config.model.n_layers,
        "loops": config.model.loops,
        "sequences": rows,
        "seq_len": length,
        "probes": batch.probes,
        "draw": batch.seed,
        "torch": torch.__version__,
    }
    write_json(folder / "diagnose.json", about | {"readings": readings})
    from deeploop.analyze import plots  # matplotlib is slow to import

    plots.diagnosis(readings, folder / "diagnose.png")
