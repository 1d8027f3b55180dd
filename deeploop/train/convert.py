"""Make a run at step 0 whose looped model starts from a trained one without loops."""

import dataclasses
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from deeploop.eval.generate import load_model
from deeploop.model.convert.recursion import looped_from
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.runs import checkpoint
from deeploop.runs.folder import CONFIG, choose_run_folder, claim_folder, lock_run_folder
from deeploop.train.optim import make_optimizer
from deeploop.utils.disk import write_text


class Converted(NamedTuple):
    """A run that `convert` has made."""

    folder: Path
    model: LoopLM
    parameters_before: int


def convert(
    run: str, loops: int, init: str = "stepwise", rank: int = 0, out: str = ""
) -> Converted:
    """Write a run's folder whose checkpoint at step 0 is a looped model made from another run's.

    It has the corpus, the tokenizer and the training fields of that run, to go on with `--resume`,
    or to start from with `train.init`.

    Args:
        run: folder or checkpoint of a model without loops.
        loops, init, rank: as for `deeploop.model.convert.recursion.looped_from`.
        out: folder of the new run; empty: runs/PRESET-RULE-TIME.

    Raises:
        InputError: the run is missing or damaged, cannot be looped so, or the folder exists.
    """
    ckpt = checkpoint.find(run)
    old = load_model(ckpt, torch.device("cpu"))
    model_config, weights = looped_from(old.state_dict(), ckpt.config.model, loops, init, rank)
    config = dataclasses.replace(ckpt.config, model=model_config)
    config = config.replace("train", out=out, init="", teacher="")
    model = LoopLM(model_config)
    model.load_state_dict(weights)
    folder = choose_run_folder(config)
    if not out:
        folder = claim_folder(folder)
    with lock_run_folder(folder, new=True):
        try:
            write_text(folder / CONFIG, config.to_json())
            checkpoint.copy_corpus(ckpt.described_in, folder)
            checkpoint.save(folder, 0, config, model, make_optimizer(model, config.train))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return Converted(folder, model, count_parameters(old))
