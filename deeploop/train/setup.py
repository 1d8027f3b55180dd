"""Make a trainer from a configuration: resolve, check and describe it before step one."""

import contextlib
import importlib
import os
import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console

from deeploop.config import Config
from deeploop.config.fields import entries
from deeploop.config.model import MODELS
from deeploop.data.corpus import Corpus, load_corpus
from deeploop.data.puzzles.source import PuzzleSource, open_source
from deeploop.data.source import Source
from deeploop.data.tasks.corpus import open_task
from deeploop.model.borders import number_fields, reads_input
from deeploop.model.memory import check_training
from deeploop.model.moe.experts import check_strides
from deeploop.model.residual import residual_rule
from deeploop.runs import checkpoint
from deeploop.runs.folder import (
    choose_run_folder,
    claim_folder,
    clear_unfinished,
    difference,
    is_empty,
    lock_run_folder,
    read_corpus_file,
    write_run_files,
)
from deeploop.runs.metrics_file import copy_metrics
from deeploop.train.parents import absolute_parents, find_parents
from deeploop.train.same_start import Start, prepare_together
from deeploop.train.trainer import Trainer
from deeploop.utils.console import say
from deeploop.utils.device import computes_in_bf16, pick_device
from deeploop.utils.disk import user_path
from deeploop.utils.distributed import Ranks, local_rank
from deeploop.utils.errors import InputError


def rank_device(config: Config, ranks: Ranks) -> torch.device:
    """Return the device of this rank; raises InputError where the machine does not have it."""
    device = pick_device(config.train.device)
    if ranks.world > 1 and device.type == "cuda":
        return torch.device("cuda", local_rank())  # not that of a resumed run's main rank
    return device


def check_memory(config: Config, ranks: Ranks) -> None:
    """Refuse a step whose part on this rank cannot fit in memory; raises InputError."""
    sequences = len(ranks.local_rows(config.train.batch_size))
    check_training(config, rank_device(config, ranks), sequences)


def resolve(config: Config, corpus: Source, ranks: Ranks) -> Config:
    """Fill in the device, precision and vocabulary that the configuration leaves open."""
    device = rank_device(config, ranks)
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
    if m.prelude and cut_off and not reads_input(m, residual_rule(m)):
        raise InputError(
            f"model.prelude={m.prelude}: gets no gradient with train.backprop=last under "
            f"model.residual={m.residual} and model.inject=none, where later loops do not read its "
            "output; use full or segments, model.inject, or model.prelude 0"
        )
    check_draws(config)
    if m.moe.experts and m.moe.backend == "grouped_mm":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        check_strides(m.d_model, m.moe.d_expert or m.d_model, dtype, device)
    config = config.replace("model", vocab_size=vocab)
    if isinstance(corpus, PuzzleSource):
        config = fit_puzzles(config, corpus)
    config = config.replace("data", **absolute_paths(config, corpus))
    config = config.replace("train", **absolute_parents(config))
    return config.replace("train", device=str(device), precision=precision)


def fit_puzzles(config: Config, corpus: PuzzleSource) -> Config:
    """Give a reasoner the number of puzzles; raises InputError where the cells are not its own."""
    m = config.model
    if m.seq_len != corpus.seq_len:
        raise InputError(
            f"model.seq_len={m.seq_len}: the puzzles of {config.data.puzzles} have "
            f"{corpus.seq_len} cells; give that"
        )
    rows = (m.reasoner.puzzles or corpus.puzzles) if m.reasoner.puzzle_tokens else 0
    if m.reasoner.puzzle_tokens and rows < corpus.puzzles:
        raise InputError(
            f"model.reasoner.puzzles={rows}: smaller than the {corpus.puzzles} of the data; give "
            "at least that, or 0 to take it"
        )
    return config.replace("model.reasoner", puzzles=rows)


def check_draws(config: Config) -> None:
    """Refuse a number of loops for each sequence where a loop depends on its number.

    A sequence of fewer loops than the others of its batch starts later, so that all end, and get
    their gradients, together. Raises InputError.
    """
    fields = number_fields(config.model, residual_rule(config.model))
    if config.train.loop_count_per == "sequence" and fields:
        raise InputError(
            f"train.loop_count_per=sequence: needs loops that do not depend on their number; "
            f"give batch, or change {fields}"
        )


def absolute_paths(config: Config, corpus: Source) -> dict[str, str]:
    """Return data.path and data.tokenizer as they are valid in any working directory."""
    path, spec = config.data.path, config.data.tokenizer
    if path:
        path = str(user_path(path, "data.path").resolve())
    if corpus.tokenizer is not None and spec not in ("auto", "byte", "gpt2"):
        spec = corpus.tokenizer.spec
    return {"path": path, "tokenizer": spec}


def check_compiler() -> None:
    """Refuse train.compile on a CPU where torch would find no C++ compiler at step one."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise InputError(
            f"train.compile=True: needs a C++ compiler, and {name!r} is not found; install it, "
            "set CXX, or leave train.compile out"
        )


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

    They and the metrics would be of another past than the run's. Its folder must be locked.
    """
    assert ckpt.run is not None  # `same_folder` has refused a copy without --out
    newest = checkpoint.steps(ckpt.run)[-1]
    if newest.name != ckpt.path.name:
        raise InputError(
            f"checkpoint {ckpt.path}: the run is already at {newest.name}; give --out to go on "
            "from here in a new folder, or delete the newer ones"
        )


def check_same_corpus(corpus: Source, ckpt: checkpoint.Checkpoint) -> None:
    """Refuse to go on with other tokens than the run began with, wherever they lie."""
    before = read_corpus_file(ckpt.described_in)
    now = corpus.identity()
    if "content" not in before:  # a run of an older version has fingerprints alone
        del now["content"]
    if any(before.get(name) != value for name, value in now.items()):
        if corpus.answers:
            raise InputError(
                f"{corpus.name} has other examples than when the run of {ckpt.path} began, of "
                "another version or place; start a new run without --resume"
            )
        sizes = f"{before.get('train_tokens')} training tokens then, {now.get('train_tokens')} now"
        raise InputError(
            f"the corpus {corpus.name} changed since the run of {ckpt.path} began, or is read in "
            f"another way ({sizes}); give the place of the same text as --data, its tokenizer "
            "as --data.tokenizer, or start a new run without --resume"
        )


def read_corpus(config: Config) -> Source:
    """Load the text or the task that a configuration names."""
    if config.data.puzzles:
        return open_source(config.data.puzzles)
    if config.data.task:
        return open_task(config.data, config.model.seq_len)
    return load_corpus(
        config.data.path,
        config.data.tokenizer,
        text_field=config.data.text_field,
        val_fraction=config.data.val_fraction,
        vocab_size=config.model.vocab_size or None,
        verify=config.data.verify,
    )


def open_corpus(config: Config) -> Source:
    """Load the text or task to train on; raises InputError if it is shorter than one sequence."""
    corpus = read_corpus(config)
    if isinstance(corpus, Corpus):
        check_lengths(corpus, config)
    return corpus


def check_lengths(corpus: Corpus, config: Config) -> None:
    """Refuse a text without held-out tokens, or one shorter than a sequence."""
    if not len(corpus.val):
        raise InputError(
            f"data.val_fraction={config.data.val_fraction}: leaves no text to validate on; give a "
            "small fraction such as 0.001, or a folder with train.txt and val.txt"
        )
    if len(corpus.train) <= config.model.seq_len:
        raise InputError(
            f"data.path={config.data.path!r}: {len(corpus.train)} training tokens are fewer than "
            f"one sequence and its target ({config.model.seq_len + 1}); give more text or a "
            "smaller model.seq_len"
        )


def trainer_class(config: Config) -> type[Trainer]:
    """Return the class that trains models of `config.model.kind`."""
    module, _, name = MODELS[config.model.kind].trainer.partition(":")
    kind: type[Trainer] = getattr(importlib.import_module(module), name)
    return kind


def open_run(
    config: Config,
    console: Console,
    ckpt: checkpoint.Checkpoint | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Trainer:
    """Load the corpus, build or restore the model, make or enter the run's folder.

    Nothing is written before everything that can be refused was checked, and only by the
    main rank. A run's folder is locked before its newest checkpoint is chosen.

    Args:
        config: of the run.
        console: receives the progress.
        ckpt: a checkpoint to go on from.
        ranks: processes that train together.
    """
    with contextlib.ExitStack() as lock:
        start = prepare_together(ranks, lambda: prepare(config, console, ckpt, ranks, lock))
        floors = start.corpus.floors() if ranks.is_main else {}
        kind = trainer_class(start.config)
        trainer = kind(start.config, start.corpus, floors, start.folder, console, ranks)
        if start.ckpt is not None and start.ckpt.saved:
            trainer.restore(start.ckpt)
        trainer.learn_from(start.parents)
        if ranks.is_main:
            begin_folder(trainer, start, lock)
        trainer.lock = lock.pop_all()
    return trainer


def prepare(
    config: Config,
    console: Console,
    ckpt: checkpoint.Checkpoint | None,
    ranks: Ranks,
    lock: contextlib.ExitStack,
) -> Start:
    """Check all that this rank knows of a run, and lock the folder of one that goes on.

    The arguments are those of `open_run`; `lock` receives the main rank's lock.
    """
    begun = restarted(config)
    if begun is not None:
        ckpt = begun
        if config.train.precision == "auto":  # another machine may resolve it to another one
            config = config.replace("train", precision=begun.config.train.precision)
    in_place = ckpt is not None and same_folder(config.train.out, ckpt)
    check_memory(config, ranks)
    if ckpt is not None and in_place and ranks.is_main:
        lock_folder(ckpt.run or ckpt.path, console, lock)
        if ckpt.newest or not ckpt.saved:  # another process may have written since
            ckpt = checkpoint.find(str(ckpt.run), begin=True)
    corpus = open_corpus(config)
    config = resolve(config, corpus, ranks)
    check_memory(config, ranks)  # the vocabulary is now known
    if ckpt is not None:
        check_same(config, ckpt)
        if ckpt.saved:
            check_same_corpus(corpus, ckpt)
        if ckpt.saved and in_place:
            check_newest(ckpt)
    if ckpt is not None and in_place:
        folder = ckpt.run or ckpt.path
    elif ranks.is_main:
        folder = choose_run_folder(config, begin=True)
    else:
        folder = Path(config.train.out)  # `prepare_together` gives it the main rank's
    parents = find_parents(config, corpus, started=ckpt is not None and ckpt.saved)
    return Start(config, corpus, ckpt, folder, not in_place, parents)


def restarted(config: Config) -> checkpoint.Checkpoint | None:
    """Return the newest checkpoint of a run that torchrun starts again after a rank has failed.

    None at its first start, without `train.out`, or where the folder is of another run.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") in ("", "0") or not config.train.out:
        return None
    if not checkpoint.steps(user_path(config.train.out, "train.out")):
        return None
    ckpt = checkpoint.find(config.train.out)
    vocab = config.model.vocab_size or ckpt.config.model.vocab_size
    precision = config.train.precision
    precision = ckpt.config.train.precision if precision == "auto" else precision
    wanted = config.replace("model", vocab_size=vocab).replace("train", precision=precision)
    # Stored as they are valid everywhere; `check_same_corpus` compares the tokens themselves.
    data = ckpt.config.data
    wanted = wanted.replace("data", path=data.path, tokenizer=data.tokenizer)
    return None if difference(wanted, ckpt.config) else ckpt


def lock_folder(
    folder: Path, console: Console, lock: contextlib.ExitStack, begins: Config | None = None
) -> None:
    """Lock a run's folder until `lock` closes; `begins` is the configuration of a new run."""
    if not lock.enter_context(lock_run_folder(folder, begins is not None, begins)):
        say(
            console,
            f"locks    off: the file system of {folder} has none; a file .lock in it keeps other "
            "runs out",
        )


def begin_folder(trainer: Trainer, start: Start, lock: contextlib.ExitStack) -> None:
    """Lock a new run's folder and write a run's first files; remove a new folder on failure."""
    fresh = start.new and (not trainer.folder.exists() or is_empty(trainer.folder))
    if start.new and not start.config.train.out:
        trainer.folder = claim_folder(trainer.folder)
    if start.new:
        lock_folder(trainer.folder, trainer.console, lock, start.config)
    try:
        clear_unfinished(trainer.folder)
        for sentence in checkpoint.clear_incomplete(trainer.folder):
            say(trainer.console, sentence)
        if start.new and start.ckpt is not None and start.ckpt.saved and start.ckpt.run:
            copy_metrics(start.ckpt.run, trainer.folder, start.ckpt.step)
        write_run_files(trainer.folder, trainer.config, trainer.corpus, trainer.floors)
    except BaseException:
        if fresh:
            shutil.rmtree(trainer.folder, ignore_errors=True)
        raise


def same_folder(out: str, ckpt: checkpoint.Checkpoint) -> bool:
    """Return whether a run with this train.out stays in its folder; without train.out it does."""
    if ckpt.run is None and not out:
        raise InputError(
            f"checkpoint {ckpt.path}: is a copy outside of a run's folder; give --out to go on "
            "from it in a new folder"
        )
    return not out or (
        ckpt.run is not None and user_path(out, "train.out").resolve() == ckpt.run.resolve()
    )
