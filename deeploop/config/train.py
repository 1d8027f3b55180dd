"""Fields of training."""

from dataclasses import dataclass
from typing import Annotated, Literal

from deeploop.config.fields import (
    FRACTION,
    MAY_CHANGE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_fields,
    flag,
)
from deeploop.utils.errors import InputError

Recompute = Literal["none", "visit", "loop"]


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
        Literal["full", "segments", "last"],
        flag(
            "how far gradients go: full, through all loops; segments: a loss and a backward every "
            "backprop-loops loops; last: through the last backprop-loops loops",
            "--backprop",
        ),
    ] = "full"
    backprop_loops: Annotated[int, flag("loops of a segment, or last loops"), POSITIVE] = 3
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
        flag("run or checkpoint whose weights the model starts from; optimizer and data start anew"),
        MAY_CHANGE,
    ] = ""
    teacher: Annotated[
        str, flag("run or checkpoint whose predictions are a second target; empty: none"), MAY_CHANGE
    ] = ""
    teacher_weight: Annotated[
        float,
        flag("weight w of KL(teacher, model) in the loss; the text's cross-entropy has 1 - w"),
        SHARE,
        MAY_CHANGE,
    ] = 0.5
    schedule: Annotated[
        Literal["wsd", "cosine"],
        flag("wsd: warm up, stay, decay; cosine: warm up, cosine decay"),
        MAY_CHANGE,
    ] = "wsd"
    warmup: Annotated[float, flag("fraction of steps spent warming up"), FRACTION, MAY_CHANGE] = 0.1
    decay: Annotated[
        float, flag("fraction of steps spent decaying (wsd)"), FRACTION, MAY_CHANGE
    ] = 0.1
    min_lr: Annotated[
        float, flag("learning rate of the last step, as a fraction of lr"), FRACTION, MAY_CHANGE
    ] = 0.0
    weight_decay: Annotated[
        float, flag("AdamW weight decay, on matrices"), NOT_NEGATIVE, MAY_CHANGE
    ] = 0.1
    decay_gains: Annotated[bool, flag("AdamW weight decay on norm gains, too")] = False
    beta1: Annotated[float, flag("AdamW first moment decay"), FRACTION, MAY_CHANGE] = 0.9
    beta2: Annotated[float, flag("AdamW second moment decay"), FRACTION, MAY_CHANGE] = 0.95
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
    save_every: Annotated[
        int, flag("steps between checkpoints; 0: only at the end"), NOT_NEGATIVE, MAY_CHANGE
    ] = 100
    keep: Annotated[
        int, flag("checkpoints kept, newest first; 0 means all"), NOT_NEGATIVE, MAY_CHANGE
    ] = 2
    out: Annotated[str, flag("run folder; empty: runs/PRESET-RULE-TIME", "--out"), MAY_CHANGE] = ""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
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
