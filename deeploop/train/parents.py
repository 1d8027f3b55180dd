"""The runs that another run learns from: whose weights it starts with, and its teacher.

    train.init      its weights are those that training starts from; optimizer, step and data
                    start anew
    train.teacher   its predictions are a target beside the text (`deeploop.model.distillation`)

Each is a run's folder or a checkpoint, with the tokenizer of the new run's corpus.
"""

from typing import Any, NamedTuple

import torch

from deeploop.config import Config
from deeploop.data.source import Source
from deeploop.data.tokenizer import load_tokenizer
from deeploop.eval.generate import load_model
from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.runs.checkpoint import Checkpoint
from deeploop.runs.folder import read_corpus_file
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError


class Parents(NamedTuple):
    """Checkpoints of other runs."""

    init: Checkpoint | None = None
    teacher: Checkpoint | None = None

    def facts(self) -> dict[str, Any]:
        """Return by name what must be the same on every rank."""
        return {
            f"the weights of train.{name}": None if ckpt is None else ckpt.sha256[checkpoint.MODEL]
            for name, ckpt in self._asdict().items()
        }


def find_parents(config: Config, corpus: Source, started: bool) -> Parents:
    """Open the checkpoints that a run learns from.

    Args:
        config: of the run, with its vocabulary.
        corpus: of the run.
        started: whether the run goes on from a checkpoint of its own, so that its first weights
            do not matter any more.

    Raises:
        InputError: there is none, or its tokenizer, vocabulary or length is another.
    """
    t = config.train
    init = None if started or not t.init else _find("init", t.init, corpus)
    teacher = _find("teacher", t.teacher, corpus) if t.teacher else None
    if teacher is not None:
        for name in ("vocab_size", "seq_len"):
            mine, theirs = getattr(config.model, name), getattr(teacher.config.model, name)
            if theirs < mine or (theirs > mine and name == "vocab_size"):
                raise InputError(
                    f"train.teacher={t.teacher!r}: its model.{name} is {theirs}, and this run's "
                    f"{mine}; give a teacher of the same, or another model.{name}"
                )
    return Parents(init, teacher)


def _find(name: str, path: str, corpus: Source) -> Checkpoint:
    """Open a checkpoint; raises InputError naming the field."""
    field = f"train.{name}={path!r}"
    try:
        ckpt = checkpoint.find(path)
        spec = read_corpus_file(ckpt.described_in).get("tokenizer")
    except InputError as error:
        raise InputError(f"{field}: {error}") from error
    if spec is not None and corpus.tokenizer is not None:
        theirs = load_tokenizer(spec, ckpt.described_in)
        if theirs.fingerprint != corpus.tokenizer.fingerprint:
            raise InputError(
                f"{field}: its tokenizer is {spec}, and this run's {corpus.tokenizer.spec}; give "
                "the same as --data.tokenizer"
            )
    return ckpt


def start_from(config: Config, ckpt: Checkpoint, model: LoopLM) -> None:
    """Copy a checkpoint's weights into a new run's model.

    Raises InputError naming the first weight that either lacks or that has another shape.
    """
    try:
        remedy = "give the model fields of that run, as in its config.json"
        checkpoint.load_weights(ckpt, model, model.may_start_fresh, remedy)
    except InputError as error:
        raise InputError(f"train.init={config.train.init!r}: {error}") from error


def load_teacher(config: Config, ckpt: Checkpoint, device: torch.device) -> LoopLM:
    """Load a teacher, in eval mode and without gradients; compiled where the run is."""
    model = load_model(ckpt, device)
    model.requires_grad_(False)
    if config.train.compile:
        for sublayer in model.all_sublayers():
            sublayer.branch.compile()
    return model


def absolute_parents(config: Config) -> dict[str, str]:
    """Return train.init and train.teacher as they are valid in any working directory."""
    return {
        name: str(user_path(path, f"train.{name}").resolve()) if path else ""
        for name in ("init", "teacher")
        for path in [getattr(config.train, name)]
    }


def describe_parents(config: Config) -> list[str]:
    """Return a line of the log for each run that this one learns from."""
    t = config.train
    start, teacher = f"start    weights of {t.init}", f"teacher  {t.teacher}, weight "
    return [start] * bool(t.init) + [f"{teacher}{t.teacher_weight:g}"] * bool(t.teacher)
