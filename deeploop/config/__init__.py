"""Everything a run is made of: dataclasses, and checks at the door.

Named configurations are in `deeploop.config.presets`.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from deeploop.config import scaling
from deeploop.utils.errors import InputError

Arm = Literal["pre_norm", "deepnorm", "deeploop", "loom"]
Plan = Literal["full", "segments", "last"]
Recompute = Literal["none", "visit", "loop"]
MOST, MOST_SEED = 2**31 - 1, 2**63 - 1  # of an integer field; of a seed
MAX_EXPERTS = 512  # of sigmoid_router; importing it from there would import torch


class Limit(NamedTuple):
    """What a number may be, and how an error says so."""

    low: float
    words: str
    open_low: bool = False
    high: float = 3e38  # what float32 holds

    def admits(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and value < self.high and math.isfinite(value)


POSITIVE = Limit(0, "greater than 0", open_low=True)
NOT_NEGATIVE = Limit(0, "0 or more")
FRACTION = Limit(0, "at least 0 and less than 1", high=1)


def _flag(text: str, *aliases: str) -> Any:
    return tyro.conf.arg(help=text, aliases=aliases)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in the place of SwiGLU; without experts, SwiGLU."""

    experts: Annotated[int, _flag("routed experts; 0: a dense SwiGLU"), NOT_NEGATIVE] = 0
    top_k: Annotated[int, _flag("routed experts a token goes to"), POSITIVE] = 6
    d_expert: Annotated[int, _flag("inner width of an expert; 0: d_model"), NOT_NEGATIVE] = 0
    shared: Annotated[int, _flag("experts that every token goes to"), NOT_NEGATIVE] = 2
    router_per_loop: Annotated[bool, _flag("a router for each loop; else one for all")] = True
    router_copied: Annotated[
        bool, _flag("routers of later loops begin as copies of the first; else on their own")
    ] = True
    capacity_factor: Annotated[
        float, _flag("tokens an expert takes in training, over the mean; 0: all"), NOT_NEGATIVE
    ] = 1.5
    z_loss: Annotated[
        float, _flag("weight of each visit's mean squared logsumexp of router logits"), NOT_NEGATIVE
    ] = 1e-3
    balance_lr: Annotated[
        float, _flag("step of the bias that balances experts; 0: no bias"), NOT_NEGATIVE
    ] = 2e-3
    backend: Annotated[
        Literal["grouped_mm", "megablocks", "loop"], _flag("what multiplies the experts' matrices")
    ] = "grouped_mm"


@dataclass(frozen=True)
class LoomConfig:
    """The parts of LOOM (arXiv 2610.01153), each a switch; used by residual loom."""

    strength: Annotated[float, _flag("lambda of gamma and g_t"), POSITIVE] = 0.5
    decay: Annotated[float, _flag("beta of the two averages of attention"), FRACTION] = 0.5
    scaling: Annotated[bool, _flag("scale branches by gamma; else by 1")] = True
    injection: Annotated[bool, _flag("mix the embedding in again from loop 2 on")] = True
    branch_norm: Annotated[bool, _flag("RMSNorm behind the MoE branch")] = True
    looping_residual: Annotated[
        bool, _flag("two moving averages of attention outputs; else the output alone")
    ] = True
    global_source: Annotated[
        Literal["output", "readout"],
        _flag("what the global average takes: the paper's output or the released code's readout"),
    ] = "output"
    carry: Annotated[
        Literal["raw", "normalised"],
        _flag("the stream between loops: as it is (paper) or normalised (released code)"),
    ] = "raw"


@dataclass(frozen=True)
class ModelConfig:
    """A looped language model: K = n_layers sublayer_index blocks, run R = loops times."""

    residual: Annotated[Arm, _flag("residual rule: baseline is a pre-norm loop")] = "deeploop"
    d_model: Annotated[int, _flag("width of the residual stream"), POSITIVE] = 192
    n_layers: Annotated[
        int, _flag("sublayer_index blocks K: attention + SwiGLU or MoE"), POSITIVE
    ] = 2
    loops: Annotated[
        int, _flag("loops R in training; the residual scales follow from it"), POSITIVE
    ] = 4
    n_heads: Annotated[int, _flag("attention heads; must divide d_model"), POSITIVE] = 3
    d_ff: Annotated[
        int, _flag("SwiGLU inner width; 0 means 8/3 d_model, up to 64s"), NOT_NEGATIVE
    ] = 0
    vocab_size: Annotated[int, _flag("rows of the embedding; 0: the tokenizer's"), NOT_NEGATIVE] = 0
    seq_len: Annotated[int, _flag("tokens per training sequence"), POSITIVE] = 128
    p: Annotated[float | None, _flag("exponent of alpha and beta; none: the residual's own")] = None
    qk_norm: Annotated[bool, _flag("parameter-free RMSNorm on queries and keys")] = False
    rope_base: Annotated[float, _flag("RoPE base frequency"), POSITIVE] = 10000.0
    norm_eps: Annotated[float, _flag("epsilon of every RMSNorm"), POSITIVE] = 1e-6
    embed_std: Annotated[float, _flag("std of the initial embedding"), POSITIVE] = 0.02
    moe: MoEConfig = field(default_factory=MoEConfig)
    loom: LoomConfig = field(default_factory=LoomConfig)

    @property
    def ff_width(self) -> int:
        return self.d_ff or 64 * -(-8 * self.d_model // (3 * 64))

    @property
    def exponent(self) -> float | None:
        """p of alpha = (2N)^p and beta = (8N)^-p; None for the residuals without."""
        if self.residual not in ("deepnorm", "deeploop"):
            return None
        own = (
            scaling.DEEPNORM_EXPONENT if self.residual == "deepnorm" else scaling.DEEPLOOP_EXPONENT
        )
        return own if self.p is None else self.p

    @property
    def alpha(self) -> float:
        """Run-time residual scale, fixed by the training loops; 1 for the residuals without."""
        p = self.exponent
        return 1.0 if p is None else scaling.alpha(self.n_layers * self.loops, p)

    @property
    def beta(self) -> float:
        """Gain on the initial V, O and FFN matrices; 1 for the residuals without."""
        p = self.exponent
        return 1.0 if p is None else scaling.beta(self.n_layers * self.loops, p)

    @property
    def gamma(self) -> float:
        """LOOM's branch scale, fixed by the training loops; 1 where it is off."""
        if self.residual != "loom" or not self.loom.scaling:
            return 1.0
        return scaling.loom_gamma(self.n_layers, self.loops, self.loom.strength)

    def injection(self, loop: int) -> float:
        """Weight of the embedding at the start of a loop counted from 0; 0 where none is."""
        if self.residual != "loom" or not self.loom.injection:
            return 0.0
        return scaling.injection_weight(loop + 1, self.n_layers, self.loom.strength)


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
    val_fraction: Annotated[float, _flag("tail of a text corpus held out"), FRACTION] = 0.1


@dataclass(frozen=True)
class TrainConfig:
    """One run of the trainer."""

    steps: Annotated[
        int,
        _flag("batches; segments may step the optimizer several times on each", "--steps"),
        POSITIVE,
    ] = 280
    batch_size: Annotated[int, _flag("sequences per step, over all ranks"), POSITIVE] = 16
    micro_batch: Annotated[
        int, _flag("sequences per forward; 0: all of a rank's", "--micro-batch"), NOT_NEGATIVE
    ] = 0
    plan: Annotated[
        Plan,
        _flag(
            "backprop: full, through all loops; segments: a loss and a backward every backprop-loops "
            "loops; last: through the last backprop-loops loops",
            "--backprop",
        ),
    ] = "full"
    backprop_loops: Annotated[int, _flag("loops of a segment, or last loops"), POSITIVE] = 3
    step_per: Annotated[
        Literal["segment", "batch"], _flag("an optimizer step for each segment, or one a batch")
    ] = "segment"
    recompute: Annotated[
        Recompute,
        _flag("activation checkpointing: what is run again in backward"),
    ] = "none"
    lr: Annotated[float, _flag("peak learning rate", "--lr"), POSITIVE] = 1.5e-3
    schedule: Annotated[Literal["wsd", "cosine"], _flag("shape of the learning rate")] = "wsd"
    warmup: Annotated[float, _flag("fraction of steps spent warming up"), FRACTION] = 0.1
    decay: Annotated[float, _flag("fraction of steps spent decaying (wsd)"), FRACTION] = 0.1
    min_lr: Annotated[float, _flag("final learning rate, as a fraction of lr"), FRACTION] = 0.0
    weight_decay: Annotated[float, _flag("AdamW decay, on matrices"), NOT_NEGATIVE] = 0.1
    decay_gains: Annotated[bool, _flag("AdamW decay on norm gains, too")] = False
    beta1: Annotated[float, _flag("AdamW first moment decay"), FRACTION] = 0.9
    beta2: Annotated[float, _flag("AdamW second moment decay"), FRACTION] = 0.95
    clip: Annotated[float, _flag("largest gradient norm; 0 means no clipping"), NOT_NEGATIVE] = 1.0
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        _flag("auto: bf16 autocast where the device computes in it, else fp32"),
    ] = "auto"
    device: Annotated[str, _flag("auto, cpu, cuda or cuda:N")] = "auto"
    compile: Annotated[bool, _flag("torch.compile each block (needs a C++ compiler on CPU)")] = (
        False
    )
    seed: Annotated[
        int, _flag("seed of the weights and of the data order", "--seed"), NOT_NEGATIVE
    ] = 0
    log_every: Annotated[int, _flag("steps between lines of metrics.jsonl"), POSITIVE] = 10
    eval_every: Annotated[
        int, _flag("steps between validations; 0: only at the end"), NOT_NEGATIVE
    ] = 100
    eval_tokens: Annotated[
        int, _flag("held-out tokens per validation; 0 means all"), NOT_NEGATIVE
    ] = 0
    save_every: Annotated[
        int, _flag("steps between checkpoints; 0: only at the end"), NOT_NEGATIVE
    ] = 100
    keep: Annotated[int, _flag("checkpoints kept, newest first; 0 means all"), NOT_NEGATIVE] = 2
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

    def replace(self, part: str, **values: Any) -> "Config":
        """A copy with fields of one part (model, model.moe, data, ...) replaced, checked again."""
        return _replace(self, part.split("."), values)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """The inverse of `to_json`; raises InputError on unknown keys and missing parts."""
        try:
            raw = json.loads(text)
            for part in ("model", "data", "train"):
                raw[part]  # a whole part missing is no older version's file
            return _build(cls, raw)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"config: {error}; was it written by another version?") from error


def _replace(part: Any, path: list[str], values: dict[str, Any]) -> Any:
    if not path:
        return dataclasses.replace(part, **values)
    name, *rest = path
    return dataclasses.replace(part, **{name: _replace(getattr(part, name), rest, values)})


def _build(kind: Any, raw: dict[str, Any]) -> Any:
    """A dataclass out of nested dicts."""
    parts = {name: k for name, k in get_type_hints(kind).items() if dataclasses.is_dataclass(k)}
    nested = {n: _build(parts[n], v) for n, v in raw.items() if n in parts and isinstance(v, dict)}
    return kind(**raw | nested)


class Entry(NamedTuple):
    """One field of a configuration, under its dotted name."""

    name: str
    value: Any
    kind: Any
    limit: Limit | None


def entries(part: Any, prefix: str = "") -> Iterator[Entry]:
    """Every field of a configuration and of its parts."""
    kind: Any = type(part)
    plain, full = _hints(kind)
    for name, kind in plain.items():
        value = getattr(part, name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, kind):
            yield from entries(value, f"{prefix}{name}.")
        else:
            extras = getattr(full[name], "__metadata__", ())
            limit = next((x for x in extras if isinstance(x, Limit)), None)
            yield Entry(prefix + name, value, kind, limit)


@functools.cache
def _hints(kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of a dataclass's fields, without and with their extras; they take a while."""
    return get_type_hints(kind), get_type_hints(kind, include_extras=True)


def check(config: Config) -> None:
    """Refuse impossible values at the door, naming field, value and remedy."""
    found = list(entries(config))
    for entry in found:
        _check_type(entry)
    for entry in found:
        if entry.limit is not None and not entry.limit.admits(entry.value):
            raise InputError(f"{entry.name}={entry.value}: must be {entry.limit.words}")
    _check_model(config.model)
    _check_train(config.model, config.train)


def _check_type(entry: Entry) -> None:
    """Refuse a value of another type than the field's: a file can hold what no flag can."""
    value, kind, choices = entry.value, entry.kind, get_args(entry.kind)
    if get_origin(kind) is Literal:
        fits, wanted = value in choices, f"one of {', '.join(choices)}"
    elif kind is int:
        most = MOST_SEED if entry.name == "train.seed" else MOST
        fits, wanted = type(value) is int and value <= most, f"an integer up to {most}"
    elif dataclasses.is_dataclass(kind):
        fits, wanted = False, "a group of fields"
    else:
        allowed = choices or (kind,)
        fits = type(value) in allowed or (float in allowed and type(value) is int)
        wanted = " or ".join(t.__name__ for t in allowed)
    if not fits:
        raise InputError(f"{entry.name}={value!r}: must be {wanted}")


def _check_model(m: ModelConfig) -> None:
    if m.d_model % m.n_heads or (m.d_model // m.n_heads) % 2:
        raise InputError(
            f"model.n_heads={m.n_heads}: must divide model.d_model={m.d_model} "
            "into heads of an even width"
        )
    if m.p is not None and (m.residual in ("pre_norm", "loom") or not 0 <= m.p <= 2):
        raise InputError(
            f"model.p={m.p}: an exponent from 0 to 2 of the residuals deepnorm and deeploop"
            f" (model.residual={m.residual})"
        )
    if m.moe.experts > MAX_EXPERTS:
        raise InputError(f"model.moe.experts={m.moe.experts}: must not exceed {MAX_EXPERTS}")
    if m.moe.experts and m.moe.top_k > m.moe.experts:
        raise InputError(
            f"model.moe.top_k={m.moe.top_k}: must not exceed model.moe.experts={m.moe.experts}"
        )


def _check_train(m: ModelConfig, t: TrainConfig) -> None:
    if t.micro_batch > t.batch_size:
        raise InputError(
            f"train.micro_batch={t.micro_batch}: must not exceed train.batch_size={t.batch_size}"
        )
    if t.backprop == "last" and t.backprop_loops > m.loops:
        raise InputError(
            f"train.backprop_loops={t.backprop_loops}: must not exceed model.loops={m.loops} "
            "with train.backprop=last"
        )
    if t.warmup + t.decay > 1:
        raise InputError(
            f"train.warmup={t.warmup} and train.decay={t.decay}: must not add up to more than 1"
        )
