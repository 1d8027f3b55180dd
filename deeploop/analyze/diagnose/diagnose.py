"""Diagnose weight sharing: `deeploop diagnose RUN|PRESET`.

A preset is diagnosed at initialisation; a run at initialisation and at each checkpoint that it
has. All states use the same held-out batch, in float32, under full backprop even if the run
trains otherwise. The results are diagnose.json and diagnose.png.
`deeploop.analyze.diagnose.per_loop` defines kappa_R,
`deeploop.analyze.diagnose.diagnostics` the other figures.
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

from deeploop.analyze.diagnose.diagnostics import Batch, Measurement, as_figures, measure_state
from deeploop.analyze.plan.memory import LiveBytes
from deeploop.config import Config
from deeploop.config.fields import MAX_SEED
from deeploop.data.source import Source
from deeploop.model.looplm import LoopLM
from deeploop.model.memory import check_diagnosis
from deeploop.runs import checkpoint
from deeploop.runs.folder import choose_run_folder, claim_folder
from deeploop.train.optim import make_optimizer
from deeploop.train.setup import check_same, check_same_corpus, read_corpus, resolve
from deeploop.utils.console import print_whole, say
from deeploop.utils.device import device_name, pick_device
from deeploop.utils.disk import disk_errors, user_path, write_json
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import Diverged, InputError
from deeploop.utils.memory import in_bytes


def diagnose(
    config: Config,
    ckpts: list[checkpoint.Checkpoint],
    console: Console,
    *,
    probes: int = 4,
    sequences: int = 0,
    draw: int = 0,
) -> list[dict[str, Any]]:
    """Diagnose a preset at initialisation, or a run's checkpoints; writes the results.

    Args:
        config: the preset's, or the run's.
        ckpts: the run's checkpoints; none for a preset.
        console: prints the table.
        probes: random probes of the Jacobian, a backward each.
        sequences: held-out ones; 0: the run's micro-batch, or all if they are fewer.
        draw: seed of the sequences and the probes.

    Returns:
        The readings of diagnose.json, one for each state.

    Raises:
        InputError: the input cannot be diagnosed; raised before anything is computed.
        Diverged: a figure is not finite; nothing is written.
    """
    for name, value, least in (("probes", probes, 1), ("sequences", sequences, 0)):
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")
    if not 0 <= draw <= MAX_SEED:
        raise InputError(f"draw={draw}: must be from 0 to {MAX_SEED}")
    config.model.require_loops("diagnose")
    device = pick_device(config.train.device)
    check_diagnosis(config, device, 1)
    corpus = read_corpus(config)
    for ckpt in ckpts:
        check_same(config, ckpt)
        check_same_corpus(corpus, ckpt)
    config = float32_config(config, corpus)
    batch = draw_batch(corpus, config, sequences, probes, draw)
    check_diagnosis(config, device, len(batch.tokens))
    readings = []
    chosen_here = not config.train.out and not ckpts
    with output_folder(choose_folder(config, ckpts), chosen_here) as folder:
        for line in describe(config, batch):
            say(console, line)
        for step, model, optimizer in states(config, ckpts):
            measured = measure_state(model, optimizer, config, step, batch)
            check_finite(measured, step)
            readings.append(as_figures(measured, config, step))
        print_whole(console, table(readings))
        write_results(folder, config, batch, readings)
    say(console, f"wrote    {folder}/diagnose.json and diagnose.png")
    return readings


def choose_folder(config: Config, ckpts: list[checkpoint.Checkpoint]) -> Path:
    """Return train.out where it is set, else the run's folder, for a preset a new one.

    For a checkpoint copied out of its run, that is the checkpoint's folder.
    """
    if config.train.out:
        return user_path(config.train.out, "train.out")
    return ckpts[0].run or ckpts[0].path if ckpts else choose_run_folder(config)


@contextlib.contextmanager
def output_folder(folder: Path, unique: bool) -> Iterator[Path]:
    """Create the folder and check that it is writable; on failure remove it if it was new.

    Yields its path: with `unique`, that of a folder that did not exist, NAME-2 for NAME.
    """
    new = unique or not folder.exists()
    try:
        with disk_errors(f"folder {folder}", folder):
            if unique:
                folder = claim_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        yield folder
    except BaseException:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def check_finite(m: Measurement, step: int) -> None:
    """Raise Diverged where a figure is not finite: JSON has no number for it."""
    if not all(x.isfinite().all() for x in (m.loss, m.stream, m.g, m.u, m.output_change)):
        raise Diverged(
            f"the loss, a gradient or the stream at step {step} is not finite on this batch, "
            "so that there is nothing to diagnose; nothing was written"
        )


def checkpoints(path: str) -> list[checkpoint.Checkpoint]:
    """Return the checkpoint at `path`, or all those of the run at `path`, oldest first."""
    ckpt = checkpoint.find(path)
    if ckpt.run is None or user_path(path, "run").resolve() == ckpt.path.resolve():
        return [ckpt]
    return [checkpoint.find(str(step)) for step in checkpoint.steps(ckpt.run)]


def states(
    config: Config, ckpts: list[checkpoint.Checkpoint]
) -> Iterator[tuple[int, LoopLM, torch.optim.Optimizer]]:
    """Yield (step, model, optimizer) at initialisation, then of each checkpoint."""
    for ckpt in (None, *ckpts):
        torch.manual_seed(config.train.seed)
        model = LoopLM(config.model).to(config.train.device)
        optimizer = make_optimizer(model, config.train)
        if ckpt is not None:
            checkpoint.load_weights(ckpt, model)
            checkpoint.load_optimizer(ckpt, optimizer, model)
        yield 0 if ckpt is None else ckpt.step, model, optimizer


def draw_batch(corpus: Source, config: Config, size: int, probes: int, seed: int) -> Batch:
    """Draw held-out sequences, none twice, by the seed alone; size 0: see `diagnose`."""
    length, t = config.model.seq_len, config.train
    most = corpus.held_out_sequences(length)
    if not most:
        tokens = corpus.held_out_targets + 1
        raise InputError(
            f"data.path={config.data.path!r}: {tokens} held-out tokens are fewer than "
            f"one sequence and its target ({length + 1}); give more text or a larger "
            "data.val_fraction"
        )
    if size > most:
        raise InputError(
            f"sequences={size}: there are {most} held-out sequences of {length} tokens; "
            "give at most that"
        )
    size = size or min(t.micro_batch or t.batch_size, most)
    inputs, targets = corpus.draw_held_out(seed, size, length)
    return Batch(inputs.to(t.device), targets.to(t.device), probes, seed)


def float32_config(config: Config, corpus: Source) -> Config:
    """Return the run's configuration in float32, not compiled, without megablocks."""
    config = config.replace("train", precision="fp32", compile=False)
    if config.model.moe.backend == "megablocks":
        config = config.replace("model.moe", backend="reference")
    return resolve(config, corpus, Ranks())


def describe(config: Config, batch: Batch) -> list[str]:
    """Return lines with the model, the batch and the cost of the diagnosis."""
    m, t = config.model, config.train
    sequences, length = batch.tokens.shape
    peak = in_bytes(peak_bytes(config, sequences))
    trained = "" if t.backprop == "full" else f" (the run trains under {t.backprop})"
    return [
        f"model    {config.preset}: {m.residual}, {m.n_layers} blocks x {m.loops} loops, width "
        f"{m.d_model}",
        f"batch    {sequences} x {length} held-out tokens; gradients: full backprop, "
        f"float32{trained}",
        f"cost     {1 + batch.probes} backwards and 2 forwards a checkpoint, {peak} "
        f"(counted) on {device_name(batch.tokens.device)}",
    ]


def peak_bytes(config: Config, sequences: int) -> int:
    """Count the peak bytes of a diagnosis of so many sequences; allocates none of them."""
    with FakeTensorMode(allow_non_fake_inputs=False), LiveBytes() as live:
        model = LoopLM(config.model)
        tokens = torch.zeros(sequences, config.model.seq_len, dtype=torch.int64)
        measure_state(
            model, make_optimizer(model, config.train), config, 0, Batch(tokens, tokens, 1, 0)
        )
        return live.peak


def table(readings: list[dict[str, Any]]) -> Table:
    """Make a table with a row for each state."""
    rows = Table(box=None, padding=(0, 2, 0, 0))
    names = (
        "step", "loss", "kappa", "gamma", "p", "kappa of directions", "cosine", "RMS", "change",
        "change / bound",
    )  # fmt: skip
    for name in names:
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("sublayer of the largest kappa", no_wrap=True)
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


def write_results(
    folder: Path, config: Config, batch: Batch, readings: list[dict[str, Any]]
) -> None:
    """Write diagnose.json and diagnose.png."""
    sequences, length = batch.tokens.shape
    about = {
        "preset": config.preset,
        "residual": config.model.residual,
        "n_layers": config.model.n_layers,
        "loops": config.model.loops,
        "sequences": sequences,
        "seq_len": length,
        "probes": batch.probes,
        "draw": batch.seed,
        "torch": torch.__version__,
    }
    write_json(folder / "diagnose.json", about | {"readings": readings})
    from deeploop.analyze import plots  # matplotlib is slow to import

    plots.diagnosis(readings, folder / "diagnose.png")
