"""Make a trainer from a configuration: resolve, check and describe it before step one."""

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from deeploop.config import Config
from deeploop.config.backprop import optimizer_steps
from deeploop.config.fields import entries
from deeploop.config.model import RESIDUALS
from deeploop.data.corpus import Corpus, load_corpus
from deeploop.data.ngrams import ngram_bits
from deeploop.model.looplm import count_parameters
from deeploop.model.moe.experts import check_strides
from deeploop.model.residual import residual_rule
from deeploop.runs import checkpoint
from deeploop.runs.folder import (
    choose_run_folder,
    corpus_identity,
    lock_run_folder,
    read_corpus_file,
    write_run_files,
)
from deeploop.train.trainer import Trainer
from deeploop.utils.device import computes_in_bf16, device_name, pick_device
from deeploop.utils.disk import user_path
from deeploop.utils.distributed import Ranks, local_rank
from deeploop.utils.errors import InputError


def resolve(config: Config, corpus: Corpus, ranks: Ranks) -> Config:
    """Fill in the device, precision and vocabulary that the configuration leaves open."""
    device = pick_device(config.train.device)
    if ranks.world > 1 and device.type == "cuda":
        device = torch.device(
            "cuda", local_rank()
        )  # not the device that a resumed run's main rank had
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if computes_in_bf16(device) else "fp32"
    if config.train.compile and device.type == "cpu":
        check_compiler()
    vocab = config.model.vocab_size or corpus.vocab_size
    if vocab < corpus.vocab_size:
        raise InputError(
            f"model.vocab_size={vocab}: smaller than the corpus's {corpus.vocab_size}; "
            "give at least that, or 0 to take it"
        )
    m, t = config.model, config.train
    cut_off = t.backprop == "last" and t.backprop_loops < m.loops
    if m.prelude and cut_off and m.inject == "none" and not residual_rule(m).uses_input:
        raise InputError(
            f"model.prelude={m.prelude}: gets no gradient with train.backprop=last under "
            f"model.residual={m.residual} and model.inject=none: later loops do not read its output; "
            "use full or segments, model.inject, or model.prelude 0"
        )
    if m.moe.experts and m.moe.backend == "grouped_mm":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        check_strides(m.d_model, m.moe.d_expert or m.d_model, dtype, device)
    config = config.replace("model", vocab_size=vocab)
    return config.replace("train", device=str(device), precision=precision)


def check_compiler() -> None:
    """Refuse train.compile on a CPU where torch would find no C++ compiler at step one."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise InputError(
            f"train.compile=True: needs a C++ compiler, and {name!r} is not found; install it, "
            "set CXX, or leave train.compile out"
        )


def describe(trainer: Trainer) -> list[str]:
    """Return the log's first lines: the model, the data and the implementations that run."""
    c, m = trainer.config, trainer.config.model
    kernels = "Triton kernels" if trainer.device.type == "cuda" else "closed forms in PyTorch"
    blocks = f"{m.n_layers} blocks x {m.loops} loops"
    if m.prelude or m.coda:
        blocks = f"{m.prelude} + {m.n_layers} x {m.loops} loops + {m.coda} blocks"
    scales = trainer.model.rule.describe()
    scale = f", {scales}" if scales else ""
    experts = ""
    if m.moe.experts:
        e = m.moe
        experts = f"; experts: {e.backend}, {e.top_k} of {e.experts} + {e.shared} shared"
    return [
        f"model    {c.preset}: {m.residual}, {blocks}, "
        f"width {m.d_model}, {count_parameters(trainer.model):,} parameters{scale}",
        f"data     {trainer.corpus.describe()}",
        f"paths    {device_name(trainer.device)}, {c.train.precision}; updates: {kernels}; "
        f"attention: PyTorch{experts}; loss: chunked cross-entropy"
        f"{'; branches compiled' if c.train.compile else ''}",
        f"backprop {describe_backprop(trainer)}",
        *(f"unused   {name}" for name in without_effect(c)),
        f"run      {trainer.folder}",
    ]


def without_effect(config: Config) -> list[str]:
    """Return a line for each field that was set but that another field leaves without effect."""
    m, t = config.model, config.train
    mine = RESIDUALS[m.residual].section
    sections = {c.section for c in RESIDUALS.values() if c.section and c.section != mine}
    reasons = {name: f"model.residual={m.residual}" for name in sorted(sections)}
    if not m.moe.experts:
        reasons["moe"] = "model.moe.experts=0"
    lines = [
        f"{e.name}={e.value}: no effect with {reason}"
        for name, reason in reasons.items()
        for e, default in zip(
            entries(getattr(m, name), f"model.{name}."),
            entries(type(getattr(m, name))()),
            strict=True,
        )
        if e.value != default.value
    ]
    if t.backprop == "full" and t.backprop_loops != type(t)().backprop_loops:
        lines.append(f"train.backprop_loops={t.backprop_loops}: no effect with train.backprop=full")
    return lines


def describe_backprop(trainer: Trainer) -> str:
    """Return how far gradients go, how often the optimizer steps, what is recomputed."""
    t, loops = trainer.config.train, trainer.config.model.loops
    groups = optimizer_steps(t, loops)
    steps = len(groups)
    spans = [f"{s.loops.start + 1}-{s.loops.stop}" for group in groups for s in group]
    line = {
        "full": "full",
        "segments": f"segments: loops {', '.join(spans)}",
        "last": f"last: gradients through loops {spans[0]} of {loops}",
    }[t.backprop]
    line += f"; {steps} optimizer step{'s' if steps > 1 else ''} a batch"
    if t.recompute != "none":
        line += f", each {t.recompute} run again in backward"
    return line + (f", {trainer.ranks.world} ranks" if trainer.ranks.world > 1 else "")


def check_same(wanted: Config, ckpt: checkpoint.Checkpoint) -> None:
    """Refuse to go on with another model, corpus, batch or seed than the checkpoint's."""
    new = {entry.name: entry.value for entry in entries(wanted)}
    for entry in entries(ckpt.config):
        if new[entry.name] != entry.value and not entry.may_change:
            raise InputError(
                f"{entry.name}={new[entry.name]}: the checkpoint {ckpt.path} was trained with "
                f"{entry.value}; leave it out to go on with that"
            )
    if wanted.train.steps < ckpt.step:
        raise InputError(
            f"train.steps={wanted.train.steps}: the checkpoint is already at step {ckpt.step}"
        )


def check_newest(ckpt: checkpoint.Checkpoint) -> None:
    """Refuse to go on in place from a checkpoint that newer ones stand beside.

    They and the metrics would be of another past than the run's.
    """
    newest = checkpoint.steps(ckpt.run)[-1]
    if newest.name != ckpt.path.name:
        raise InputError(
            f"checkpoint {ckpt.path}: the run is already at {newest.name}; give --out to go on "
            "from here in a new folder, or delete the newer ones"
        )


def check_same_corpus(corpus: Corpus, ckpt: checkpoint.Checkpoint) -> None:
    """Refuse to go on where the text under the run is no longer the one it began with."""
    before = read_corpus_file(ckpt.run)
    now = corpus_identity(corpus)
    if any(before.get(name) != value for name, value in now.items()):
        raise InputError(
            f"data.path={ckpt.config.data.path!r}: changed since the run {ckpt.run} began "
            f"({before.get('train_tokens')} training tokens then, {now['train_tokens']} now); "
            "restore it or start a new run"
        )


def ngram_floors(corpus: Corpus) -> dict[str, float]:
    """Return the loss that unigram and bigram counts reach, in nats per held-out token."""
    unigram, bigram = ngram_bits(corpus.train, corpus.val, corpus.vocab_size)
    floors = {"unigram": unigram * math.log(2)}
    return floors if bigram is None else floors | {"bigram": bigram * math.log(2)}


def read_corpus(config: Config) -> Corpus:
    """Load the corpus that a configuration names."""
    return load_corpus(
        config.data.path,
        config.data.tokenizer,
        text_field=config.data.text_field,
        val_fraction=config.data.val_fraction,
        vocab_size=config.model.vocab_size or None,
    )


def open_corpus(config: Config) -> Corpus:
    """Load the corpus to train on; raises InputError if it is shorter than one sequence."""
    corpus = read_corpus(config)
    if len(corpus.train) <= config.model.seq_len:
        raise InputError(
            f"data.path={config.data.path!r}: {len(corpus.train)} training tokens are fewer than "
            f"one sequence and its target ({config.model.seq_len + 1}); give more text or a "
            "smaller model.seq_len"
        )
    return corpus


def open_run(
    config: Config,
    console: Console,
    ckpt: checkpoint.Checkpoint | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008
    check: Callable[[Config], None] | None = None,
) -> Trainer:
    """Load the corpus, build or restore the model, make or enter the run's folder.

    Nothing is written before everything that can be refused was checked, and only by the
    main rank.

    Args:
        config: of the run.
        console: receives the progress.
        ckpt: a checkpoint to go on from.
        ranks: processes that train together.
        check: raises InputError for a resolved configuration that must not start.
    """
    corpus = open_corpus(config)
    config = resolve(config, corpus, ranks)
    if check is not None:
        check(config)
    if ckpt is not None:
        check_same(config, ckpt)
        check_same_corpus(corpus, ckpt)
    floors = ngram_floors(corpus) if ranks.is_main else {}
    new = ckpt is None or not same_folder(config.train.out, ckpt.run)
    if ckpt is not None and not new:
        check_newest(ckpt)
    if ranks.is_main:
        folder = choose_run_folder(config) if ckpt is None or new else ckpt.run
    else:
        folder = Path(config.train.out)  # which only the first rank writes to
    trainer = Trainer(config, corpus, floors, folder, console, ranks)
    if ckpt is not None:
        trainer.restore(ckpt)
    if ranks.is_main:
        lock_run(trainer, new)
    return trainer


def lock_run(trainer: Trainer, new: bool) -> None:
    """Lock the run's folder and write its first files; remove a new folder on failure."""
    trainer.lock.enter_context(lock_run_folder(trainer.folder, new))
    try:
        write_run_files(trainer.folder, trainer.config, trainer.corpus, trainer.floors)
    except BaseException:
        if new:
            shutil.rmtree(trainer.folder, ignore_errors=True)
        raise


def same_folder(out: str, folder: Path) -> bool:
    """Return whether a run with this train.out stays in `folder`; without train.out it does."""
    return not out or user_path(out, "train.out").resolve() == folder.resolve()
