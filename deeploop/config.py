"""Everything a run is made of: dataclasses, presets by name, checks at the door."""

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from deeploop import scaling
from deeploop.errors import InputError

Arm = Literal["baseline", "deepnorm", "deeploop"]


def _flag(text: str, *aliases: str) -> Any:
    return tyro.conf.arg(help=text, aliases=aliases)


@dataclass(frozen=True)
class ModelConfig:
    """A looped language model: K = n_layers physical blocks, run R = loops times."""

    arm: Annotated[Arm, _flag("residual rule: baseline is a pre-norm loop")] = "deeploop"
    d_model: Annotated[int, _flag("width of the residual stream")] = 192
    n_layers: Annotated[int, _flag("physical blocks K, attention + SwiGLU each")] = 2
    loops: Annotated[int, _flag("loops R in training; alpha and beta follow from K*R")] = 4
    n_heads: Annotated[int, _flag("attention heads; must divide d_model")] = 3
    d_ff: Annotated[int, _flag("SwiGLU inner width; 0 means 8/3 d_model, up to 64s")] = 0
    vocab_size: Annotated[int, _flag("rows of the tied embedding; 0: the tokenizer's")] = 0
    seq_len: Annotated[int, _flag("tokens per training sequence")] = 128
    p: Annotated[float | None, _flag("exponent of alpha and beta; none: the arm's own")] = None
    qk_norm: Annotated[bool, _flag("parameter-free RMSNorm on queries and keys")] = False
    rope_base: Annotated[float, _flag("RoPE base frequency")] = 10000.0
    norm_eps: Annotated[float, _flag("epsilon of every RMSNorm")] = 1e-6
    embed_std: Annotated[float, _flag("std of the initial embedding")] = 0.02

    @property
    def ff_width(self) -> int:
        return self.d_ff or 64 * -(-8 * self.d_model // (3 * 64))

    @property
    def exponent(self) -> float | None:
        """p of alpha = (2N)^p and beta = (8N)^-p; None for the pre-norm baseline."""
        if self.arm == "baseline":
            return None
        own = scaling.DEEPNORM_EXPONENT if self.arm == "deepnorm" else scaling.DEEPLOOP_EXPONENT
        return own if self.p is None else self.p

    @property
    def alpha(self) -> float:
        """Run-time residual scale, fixed by the training loops; 1 for the baseline."""
        p = self.exponent
        return 1.0 if p is None else scaling.alpha(self.n_layers * self.loops, p)

    @property
    def beta(self) -> float:
        """Gain on the initial V, O and FFN matrices; 1 for the baseline."""
        p = self.exponent
        return 1.0 if p is None else scaling.beta(self.n_layers * self.loops, p)


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    path: Annotated[
        str,
        _flag(
            "text, .jsonl, .parquet, or a file or folder of .bin token shards; "
            "empty: the help topics every CPython ships",
            "--data",
        ),
    ] = ""
    tokenizer: Annotated[
        str, _flag("byte, gpt2, gpt2:DIR with vocab.json and merges.txt, or a tokenizer.json")
    ] = "byte"
    text_field: Annotated[str, _flag("field or column that holds the text")] = "text"
    val_fraction: Annotated[float, _flag("tail of a text corpus held out")] = 0.1


@dataclass(frozen=True)
class TrainConfig:
    """One run of the trainer."""

    steps: Annotated[int, _flag("optimizer steps", "--steps")] = 280
    batch_size: Annotated[int, _flag("sequences per optimizer step")] = 16
    micro_batch: Annotated[int, _flag("sequences per forward; 0 means batch_size")] = 0
    lr: Annotated[float, _flag("peak learning rate", "--lr")] = 1.5e-3
    schedule: Annotated[Literal["wsd", "cosine"], _flag("shape of the learning rate")] = "wsd"
    warmup: Annotated[float, _flag("fraction of steps spent warming up")] = 0.1
    decay: Annotated[float, _flag("fraction of steps spent decaying (wsd)")] = 0.1
    min_lr: Annotated[float, _flag("final learning rate, as a fraction of lr")] = 0.0
    weight_decay: Annotated[float, _flag("AdamW decay, on matrices only")] = 0.1
    beta1: Annotated[float, _flag("AdamW first moment decay")] = 0.9
    beta2: Annotated[float, _flag("AdamW second moment decay")] = 0.95
    clip: Annotated[float, _flag("largest gradient norm; 0 means no clipping")] = 1.0
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        _flag("auto: bf16 autocast where the device computes in it, else fp32"),
    ] = "auto"
    device: Annotated[str, _flag("auto, cpu, cuda or cuda:N")] = "auto"
    compile: Annotated[bool, _flag("torch.compile each block (needs a C++ compiler on CPU)")] = (
        False
    )
    seed: Annotated[int, _flag("seed of the weights and of the data order", "--seed")] = 0
    log_every: Annotated[int, _flag("steps between lines of metrics.jsonl")] = 10
    eval_every: Annotated[int, _flag("steps between validations; 0: only at the end")] = 100
    eval_tokens: Annotated[int, _flag("held-out tokens per validation; 0 means all")] = 0
    save_every: Annotated[int, _flag("steps between checkpoints; 0: only at the end")] = 100
    keep: Annotated[int, _flag("checkpoints kept, newest first; 0 means all")] = 2
    out: Annotated[str, _flag("run folder; empty: runs/PRESET-TIME", "--out")] = ""


@dataclass(frozen=True)
class Config:
    """A whole run, as saved beside its checkpoints."""

    preset: tyro.conf.Suppress[str] = "deeploop-tiny"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check(self)

    def replace(self, part: Literal["model", "data", "train"], **values: Any) -> "Config":
        """A copy with fields of one part replaced, checked again."""
        changed = dataclasses.replace(getattr(self, part), **values)
        return dataclasses.replace(self, **{part: changed})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """The inverse of `to_json`; raises InputError on unknown or missing keys."""
        raw = json.loads(text)
        parts = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
        try:
            built = {name: part(**raw.pop(name)) for name, part in parts.items()}
            return cls(**raw, **built)
        except (TypeError, KeyError, AttributeError) as error:
            raise InputError(f"config: {error}; was it written by another version?") from error


MOST, MOST_SEED = 2**31 - 1, 2**63 - 1  # of an integer field; of a seed


def check_types(config: Config) -> None:
    """Refuse values of another type than the field's: a file can hold what no flag can."""
    for part in ("model", "data", "train"):
        values = getattr(config, part)
        for name, kind in get_type_hints(type(values)).items():
            value, choices = getattr(values, name), get_args(kind)
            if get_origin(kind) is Literal:
                fits, wanted = value in choices, f"one of {', '.join(choices)}"
            elif kind is int:
                most = MOST_SEED if name == "seed" else MOST
                fits, wanted = type(value) is int and value <= most, f"an integer up to {most}"
            else:
                allowed = choices or (kind,)
                fits = type(value) in allowed or (float in allowed and type(value) is int)
                wanted = " or ".join(t.__name__ for t in allowed)
            if not fits:
                raise InputError(f"{part}.{name}={value!r}: must be {wanted}")


def check(config: Config) -> None:
    """Refuse impossible values at the door, naming field, value and remedy."""
    check_types(config)
    m, d, t = config.model, config.data, config.train
    positive = {
        "model.d_model": m.d_model,
        "model.n_layers": m.n_layers,
        "model.loops": m.loops,
        "model.n_heads": m.n_heads,
        "model.seq_len": m.seq_len,
        "model.rope_base": m.rope_base,
        "model.norm_eps": m.norm_eps,
        "model.embed_std": m.embed_std,
        "train.steps": t.steps,
        "train.batch_size": t.batch_size,
        "train.lr": t.lr,
        "train.log_every": t.log_every,
    }
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name}={value}: must be greater than 0")
    at_least_zero = {
        "model.d_ff": m.d_ff,
        "model.vocab_size": m.vocab_size,
        "train.micro_batch": t.micro_batch,
        "train.weight_decay": t.weight_decay,
        "train.clip": t.clip,
        "train.eval_every": t.eval_every,
        "train.eval_tokens": t.eval_tokens,
        "train.save_every": t.save_every,
        "train.keep": t.keep,
        "train.seed": t.seed,
    }
    for name, value in at_least_zero.items():
        if not (value >= 0 and math.isfinite(value)):
            raise InputError(f"{name}={value}: must be 0 or more")
    fractions = {
        "data.val_fraction": d.val_fraction,
        "train.warmup": t.warmup,
        "train.decay": t.decay,
        "train.min_lr": t.min_lr,
        "train.beta1": t.beta1,
        "train.beta2": t.beta2,
    }
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise InputError(f"{name}={value}: must be at least 0 and less than 1")
    _check_shapes(m, t)


def _check_shapes(m: ModelConfig, t: TrainConfig) -> None:
    if m.d_model % m.n_heads or (m.d_model // m.n_heads) % 2:
        raise InputError(
            f"model.n_heads={m.n_heads}: must divide model.d_model={m.d_model} "
            "into heads of an even width"
        )
    if m.p is not None and (m.arm == "baseline" or not 0 <= m.p <= 2):
        raise InputError(
            f"model.p={m.p}: an exponent from 0 to 2 of the arms deepnorm and deeploop"
            f" (model.arm={m.arm})"
        )
    if t.micro_batch > t.batch_size:
        raise InputError(
            f"train.micro_batch={t.micro_batch}: must not exceed train.batch_size={t.batch_size}"
        )
    if t.warmup + t.decay > 1:
        raise InputError(
            f"train.warmup={t.warmup} and train.decay={t.decay}: must not add up to more than 1"
        )


def _gpt2(size: str, loops: int, arm: Arm) -> Config:
    """The paper's models (arXiv 2607.13491), 100,000 steps of 480 x 1024 tokens: 49.15 B.

    The learning rate, its schedule, heads and QK norm it leaves unstated; they are its
    sister paper's (arXiv 2601.00417), without the muP scaling of that one. The SwiGLU of
    medium is 2752 wide, 8/3 of 1024 up to a multiple of 64: 355.1 M parameters for the
    paper's 353 M.
    """
    d_model, n_layers, n_heads = {"small": (768, 12, 6), "medium": (1024, 24, 8)}[size]
    return Config(
        preset=f"gpt2-{size}-r{loops}-{arm}",
        model=ModelConfig(
            arm=arm,
            d_model=d_model,
            n_layers=n_layers,
            loops=loops,
            n_heads=n_heads,
            vocab_size=50304,
            seq_len=1024,
            qk_norm=True,
        ),
        data=DataConfig(tokenizer="gpt2"),
        train=TrainConfig(
            steps=100_000,
            batch_size=480,
            micro_batch=16,
            lr=1e-3,
            schedule="cosine",
            warmup=0.02,
            decay=0.0,
            eval_every=1000,
            eval_tokens=2**20,
            save_every=1000,
        ),
    )


def presets() -> dict[str, Config]:
    """Every named configuration."""
    named = [Config(preset="deeploop-tiny")]
    named += [
        _gpt2(size, loops, arm)
        for size in ("small", "medium")
        for loops in (1, 3, 5, 7)
        for arm in ("baseline", "deeploop")
    ]
    return {config.preset: config for config in named}


def preset(name: str) -> Config:
    """One preset by name; raises InputError with the nearest names."""
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or list(known)
        raise InputError(f"preset {name!r}: not one of {', '.join(near)}")
    return known[name]
