"""From a configuration to a trainer: what is resolved, refused and said before step one."""

import dataclasses
import math
import os
import shutil
import sys
from pathlib import Path

from rich.console import Console

from deeploop import checkpoint, run
from deeploop.config import Config
from deeploop.data import Corpus, load_corpus
from deeploop.device import computes_in_bf16, device_name, pick_device
from deeploop.disk import user_path
from deeploop.errors import InputError
from deeploop.lm import count_parameters
from deeploop.order import ngram_bits
from deeploop.train import Trainer


def resolve(config: Config, corpus: Corpus) -> Config:
    """Fill in what was left to the machine and the corpus: device, precision, vocabulary."""
    device = pick_device(config.train.device)
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
    """The log's first lines: what runs, and on which paths."""
    c, m = trainer.config, trainer.config.model
    kernels = "Triton kernels" if trainer.device.type == "cuda" else "closed forms in PyTorch"
    scale = f", alpha {m.alpha:.3f}, beta {m.beta:.4f}" if m.exponent is not None else ""
    return [
        f"model    {c.preset}: {m.arm}, {m.n_layers} blocks x {m.loops} loops, width {m.d_model}, "
        f"{count_parameters(trainer.model):,} parameters{scale}",
        f"data     {trainer.corpus.describe()}",
        f"paths    {device_name(trainer.device)}, {c.train.precision}; updates: {kernels}; "
        f"attention: PyTorch; loss: chunked cross-entropy"
        f"{'; branches compiled' if c.train.compile else ''}",
        f"run      {trainer.folder}",
    ]


# What may change between a checkpoint and its continuation.
FREE = {
    "out", "steps", "lr", "schedule", "warmup", "decay", "min_lr", "weight_decay", "beta1", "beta2",
    "clip", "micro_batch", "device", "compile", "log_every", "eval_every", "eval_tokens",
    "save_every", "keep",
}  # fmt: skip


def check_same(wanted: Config, found: checkpoint.Checkpoint) -> None:
    """Refuse to go on with another model, corpus, batch or seed than the checkpoint's."""
    for part in ("model", "data", "train"):
        new, old = (dataclasses.asdict(getattr(c, part)) for c in (wanted, found.config))
        for name, value in old.items():
            if new[name] != value and not (part == "train" and name in FREE):
                raise InputError(
                    f"{part}.{name}={new[name]}: the checkpoint {found.path} was trained with "
                    f"{value}; leave it out to go on with that"
                )
    if wanted.train.steps < found.step:
        raise InputError(
            f"train.steps={wanted.train.steps}: the checkpoint is already at step {found.step}"
        )


def check_newest(found: checkpoint.Checkpoint) -> None:
    """Refuse to go on in place from a checkpoint that newer ones stand beside.

    They and the metrics would be of another past than the run's.
    """
    newest = checkpoint.steps(found.run)[-1]
    if newest.name != found.path.name:
        raise InputError(
            f"checkpoint {found.path}: the run is already at {newest.name}; give --out to go on "
            "from here in a new folder, or delete the newer ones"
        )


def check_same_corpus(corpus: Corpus, found: checkpoint.Checkpoint) -> None:
    """Refuse to go on where the text under the run is no longer the one it began with."""
    before = run.read_corpus(found.run)
    now = run.identity(corpus)
    if any(before.get(name) != value for name, value in now.items()):
        raise InputError(
            f"data.path={found.config.data.path!r}: changed since the run {found.run} began "
            f"({before.get('train_tokens')} training tokens then, {now['train_tokens']} now); "
            "restore it or start a new run"
        )


def ngram_floors(corpus: Corpus) -> dict[str, float]:
    """What letter and pair frequencies alone would reach, in nats per held-out token."""
    unigram, bigram = ngram_bits(corpus.train, corpus.val, corpus.vocab_size)
    floors = {"unigram": unigram * math.log(2)}
    return floors if bigram is None else floors | {"bigram": bigram * math.log(2)}


def open_run(
    config: Config, console: Console, found: checkpoint.Checkpoint | None = None
) -> Trainer:
    """Load the corpus, build or restore the model, make or enter the run's folder.

    Nothing is written before everything that can be refused was checked.
    """
    corpus = load_corpus(
        config.data.path,
        config.data.tokenizer,
        text_field=config.data.text_field,
        val_fraction=config.data.val_fraction,
        vocab_size=config.model.vocab_size or None,
    )
    config = resolve(config, corpus)
    if len(corpus.train) <= config.model.seq_len:
        raise InputError(
            f"data.path={config.data.path!r}: {len(corpus.train)} training tokens are fewer than "
            f"one sequence and its target ({config.model.seq_len + 1}); give more text or a "
            "smaller model.seq_len"
        )
    if found is not None:
        check_same(config, found)
        check_same_corpus(corpus, found)
    floors = ngram_floors(corpus)
    new = found is None or not same_folder(config.train.out, found.run)
    if found is not None and not new:
        check_newest(found)
    folder = run.choose(config) if found is None or new else found.run
    trainer = Trainer(config, corpus, floors, folder, console)
    if found is not None:
        trainer.restore(found)
    trainer.lock.enter_context(run.claimed(folder, new))
    try:
        run.start(folder, config, corpus, floors)
    except BaseException:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return trainer


def same_folder(out: str, folder: Path) -> bool:
    """Whether a run with this train.out stays in `folder`; without one it does."""
    return not out or user_path(out, "train.out").resolve() == folder.resolve()
