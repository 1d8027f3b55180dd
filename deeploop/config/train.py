"""Fields of training."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from deeploop.config.fields import (
    FRACTION,
    MAY_CHANGE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_choice,
    check_fields,
    flag,
)
from deeploop.config.loop_count import LOOP_COUNTS, listed_loops, loop_set
from deeploop.utils.errors import InputError

Recompute = Literal["none", "visit", "loop"]


class LossChoice(NamedTuple):
    """One value of `train.loss`: its class, and the settings it goes together with."""

    loss: str  # "module:Class", a subclass of deeploop.train.losses.base.Loss
    gate: bool = False  # whether it reads exit probabilities, of a model.depth that gives them
    backprops: tuple[str, ...] = ("full", "segments", "last", "progressive")
    each_loop: bool = True  # whether it reads the state after every loop


# The registry of losses. A new loss is a file in deeploop/train/losses/ and a line here.
LOSSES = {
    "last": LossChoice("deeploop.train.losses.base:Last", each_loop=False),
    "each": LossChoice("deeploop.train.losses.base:Each"),
    "expected": LossChoice("deeploop.train.losses.exits:Expected", gate=True, backprops=("full",)),
    "ponder": LossChoice("deeploop.train.losses.exits:Ponder", gate=True, backprops=("full",)),
    "gate": LossChoice("deeploop.train.losses.exits:GateAlone", gate=True, backprops=("full",)),
}

# The registry of optimizers: "module:function" of a model and a TrainConfig.
OPTIMIZERS = {
    "adamw": "deeploop.train.optim:adamw",
    "adam_atan2": "deeploop.train.optim:adam_atan2",
}


@dataclass(frozen=True)
class TrainConfig:
    """Fields of training, validation and checkpoints."""

    steps: Annotated[
        int,
        flag(
            "training steps, a batch each; with segments the optimizer may step several times",
            "--steps",
        ),
        POSITIVE,
        MAY_CHANGE,
    ] = 280
    batch_size: Annotated[
        int, flag("sequences per step, over all ranks", "--batch-size"), POSITIVE
    ] = 16
    micro_batch: Annotated[
        int,
        flag("sequences per forward; 0: all of a rank's", "--micro-batch"),
        NOT_NEGATIVE,
        MAY_CHANGE,
    ] = 0
    backprop: Annotated[
        Literal["full", "segments", "last", "progressive"],
        flag(
            "how far gradients go: full, through all loops; segments: a loss and a backward every "
            "backprop-loops loops; last: through the last backprop-loops loops; progressive: also "
            "through k loops after n without gradient, both drawn for each step",
            "--backprop",
        ),
    ] = "full"
    backprop_loops: Annotated[int, flag("loops of a segment, or last loops"), POSITIVE] = 3
    progressive_weight: Annotated[
        float,
        flag("weight of the loss after n + k loops; that of the loss after all is the rest"),
        SHARE,
    ] = 0.5
    loop_count: Annotated[
        str,
        flag(
            "loops of a step: fixed, model.loops; poisson, drawn around it (Huginn); set, drawn "
            "from loop-set",
            "--loop-count",
            choices=LOOP_COUNTS,
        ),
    ] = "fixed"
    loop_sigma: Annotated[
        float, flag("deviation of the logarithm of the rate of loop-count=poisson"), NOT_NEGATIVE
    ] = 0.5
    loop_set: Annotated[str, flag("numbers of loops to draw from, such as 2,4,8")] = ""
    loop_count_per: Annotated[
        Literal["batch", "sequence"],
        flag("one draw for a batch, or one for each sequence (steps then take the largest)"),
    ] = "batch"
    loss: Annotated[
        str,
        flag(
            "last: after the last loop; each: the mean over loops; expected (Ouro I) and ponder "
            "(PonderNet): over exit probabilities; gate (Ouro II): exit gates alone",
            "--loss",
            choices=LOSSES,
        ),
    ] = "last"
    exit_weight: Annotated[
        float,
        flag("weight beta of the exits' entropy (loss=expected) or divergence (loss=ponder)"),
        NOT_NEGATIVE,
    ] = 0.05
    exit_prior: Annotated[
        float, flag("exit probability lambda of the geometric prior of loss=ponder"), FRACTION
    ] = 0.2
    step_per: Annotated[
        Literal["segment", "batch"], flag("an optimizer step for each segment, or one a batch")
    ] = "segment"
    recompute: Annotated[
        Recompute,
        flag("activation checkpointing: run each visit or each loop again in backward"),
        MAY_CHANGE,
    ] = "none"
    lr: Annotated[float, flag("peak learning rate", "--lr"), POSITIVE, MAY_CHANGE] = 1.5e-3
    init: Annotated[
        str,
        flag(
            "run or checkpoint whose weights the model starts from; optimizer and data start anew"
        ),
        MAY_CHANGE,
    ] = ""
    teacher: Annotated[
        str,
        flag("run or checkpoint whose predictions are a second target; empty: none"),
        MAY_CHANGE,
    ] = ""
    teacher_weight: Annotated[
        float,
        flag("weight w of KL(teacher, model) in the loss; the text's cross-entropy has 1 - w"),
        SHARE,
        MAY_CHANGE,
    ] = 0.5
    optimizer: Annotated[
        str,
        flag(
            "adamw, or adam_atan2: atan2(m, sqrt v) in the place of m / (sqrt v + epsilon)",
            choices=OPTIMIZERS,
        ),
    ] = "adamw"
    schedule: Annotated[
        Literal["wsd", "cosine", "constant"],
        flag("wsd: warm up, stay, decay; cosine: warm up, cosine decay; constant: warm up, stay"),
        MAY_CHANGE,
    ] = "wsd"
    warmup: Annotated[float, flag("fraction of steps spent warming up"), FRACTION, MAY_CHANGE] = 0.1
    decay: Annotated[
        float, flag("fraction of steps spent decaying (wsd)"), FRACTION, MAY_CHANGE
    ] = 0.1
    min_lr: Annotated[
        float, flag("learning rate of the last step, as a fraction of lr"), FRACTION, MAY_CHANGE
    ] = 0.0
    weight_decay: Annotated[float, flag("weight decay, on matrices"), NOT_NEGATIVE, MAY_CHANGE] = (
        0.1
    )
    decay_gains: Annotated[bool, flag("weight decay on norm gains, too")] = False
    beta1: Annotated[float, flag("decay of the first moment"), FRACTION, MAY_CHANGE] = 0.9
    beta2: Annotated[float, flag("decay of the second moment"), FRACTION, MAY_CHANGE] = 0.95
    ema: Annotated[
        float, flag("decay of the average of weights that evaluation takes; 0: none"), FRACTION
    ] = 0.0
    puzzle_lr: Annotated[
        float, flag("step of the sign descent on puzzles' vectors"), POSITIVE, MAY_CHANGE
    ] = 1e-2
    puzzle_decay: Annotated[
        float, flag("weight decay on the vectors of a batch's puzzles"), NOT_NEGATIVE, MAY_CHANGE
    ] = 0.1
    clip: Annotated[
        float,
        flag("gradients are scaled down to this global norm; 0: no clipping"),
        NOT_NEGATIVE,
        MAY_CHANGE,
    ] = 1.0
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        flag("auto: bf16 autocast where the device computes in it, else fp32"),
    ] = "auto"
    device: Annotated[str, flag("auto, cpu, cuda or cuda:N"), MAY_CHANGE] = "auto"
    compile: Annotated[
        bool, flag("torch.compile each block (needs a C++ compiler on CPU)"), MAY_CHANGE
    ] = False
    seed: Annotated[
        int, flag("seed of the weights and of the data order", "--seed"), NOT_NEGATIVE
    ] = 0
    log_every: Annotated[
        int, flag("steps between lines of metrics.jsonl"), POSITIVE, MAY_CHANGE
    ] = 10
    eval_every: Annotated[
        int, flag("steps between validations; 0: only at the end"), NOT_NEGATIVE, MAY_CHANGE
    ] = 100
    eval_tokens: Annotated[
        int,
        flag("held-out tokens per validation, from the first one on; 0: the whole held-out text"),
        NOT_NEGATIVE,
        MAY_CHANGE,
    ] = 2**20
    eval_loops: Annotated[
        str,
        flag("also validate after these numbers of loops, such as 1,2,8 or 1..8 or 1,2,4..32"),
        MAY_CHANGE,
    ] = ""
    save_every: Annotated[
        int, flag("steps between checkpoints; 0: only at the end"), NOT_NEGATIVE, MAY_CHANGE
    ] = 100
    keep: Annotated[
        int, flag("checkpoints kept, newest first; 0 means all"), NOT_NEGATIVE, MAY_CHANGE
    ] = 2
    out: Annotated[str, flag("run folder; empty: runs/PRESET-RULE-TIME", "--out"), MAY_CHANGE] = ""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        check_choice("train.loop_count", self.loop_count, LOOP_COUNTS)
        check_choice("train.loss", self.loss, LOSSES)
        check_choice("train.optimizer", self.optimizer, OPTIMIZERS)
        self._check_loops()
        if self.micro_batch > self.batch_size:
            raise InputError(
                f"train.micro_batch={self.micro_batch}: must not exceed "
                f"train.batch_size={self.batch_size}"
            )
        if self.warmup + self.decay > 1:
            raise InputError(
                f"train.warmup={self.warmup} and train.decay={self.decay}: must not add up to "
                "more than 1"
            )

    def _check_loops(self) -> None:
        """Refuse a list of loops that is none, and losses that do not go together with a plan."""
        if self.eval_loops:
            listed_loops(self.eval_loops, "train.eval_loops")
        if self.loop_count == "set" or self.loop_set:
            try:
                loop_set(self)
            except ValueError:
                raise InputError(
                    f"train.loop_set={self.loop_set!r}: must be numbers of loops from 1 on, such as"
                    " 2,4,8"
                ) from None
        choice = LOSSES[self.loss]
        if self.backprop not in choice.backprops:
            raise InputError(
                f"train.loss={self.loss}: needs train.backprop={' or '.join(choice.backprops)}, "
                f"and it is {self.backprop}"
            )
        to_the_end = self.backprop in ("full", "last")  # where sequences that start later have run
        if self.loop_count_per == "sequence" and (choice.each_loop or not to_the_end):
            raise InputError(
                "train.loop_count_per=sequence: needs a loss after the last loop alone; give "
                f"batch, or train.loss last (it is {self.loss}) with train.backprop full or last "
                f"({self.backprop})"
            )
