"""Fields of the model, and the values of `model.residual`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from deeploop.config import scaling
from deeploop.config.depth import DEPTHS, ActConfig, MorConfig, SolverConfig, check_capacities
from deeploop.config.fields import (
    FRACTION,
    MAY_CHANGE,
    NOT_NEGATIVE,
    POSITIVE,
    check_choice,
    check_fields,
    flag,
)
from deeploop.config.reasoner import ReasonerConfig, check_reasoner
from deeploop.utils.errors import InputError

MAX_EXPERTS = 512  # of sigmoid_router; importing it from there would import torch


class ResidualChoice(NamedTuple):
    """One value of `model.residual`: its class, and the default exponent of its scales."""

    rule: str  # "module:Class", a subclass of deeploop.model.residual.base.Residual
    exponent: float | None = None  # default p of alpha = (2N)^p, beta = (8N)^-p; None: both are 1
    section: str | None = None  # the section of ModelConfig that only this rule reads
    for_reasoners: bool = False  # whether the modules of a reasoner can have it


class ModelChoice(NamedTuple):
    """A kind of model: the class that trains it, and what it goes together with."""

    trainer: str  # "module:Class", a subclass of deeploop.train.trainer.Trainer
    puzzles: bool = False  # whether it trains on data.puzzles, else on a text or a task


# The registry of kinds of models (`ModelConfig.kind`).
MODELS = {
    "language": ModelChoice("deeploop.train.language:LanguageTrainer"),
    "reasoner": ModelChoice("deeploop.train.reasoner:ReasonerTrainer", puzzles=True),
}

# The registry of residual rules. A new rule is a file in deeploop/model/residual/ and a line here.
RESIDUALS = {
    "pre_norm": ResidualChoice("deeploop.model.residual.pre_norm:PreNorm"),
    "post_norm": ResidualChoice("deeploop.model.residual.post_norm:PostNorm"),
    "plain_post_norm": ResidualChoice(
        "deeploop.model.residual.plain_post_norm:PlainPostNorm", for_reasoners=True
    ),
    "peri_norm": ResidualChoice("deeploop.model.residual.peri_norm:PeriNorm"),
    "deepnorm": ResidualChoice(
        "deeploop.model.residual.deepnorm:DeepNorm", scaling.DEEPNORM_EXPONENT
    ),
    "deeploop": ResidualChoice(
        "deeploop.model.residual.deepnorm:DeepNorm", scaling.DEEPLOOP_EXPONENT
    ),
    "loom": ResidualChoice("deeploop.model.residual.loom:Loom", section="loom"),
}


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in the place of SwiGLU; with 0 experts, SwiGLU."""

    experts: Annotated[int, flag("routed experts; 0: a dense SwiGLU"), NOT_NEGATIVE] = 0
    top_k: Annotated[int, flag("routed experts a token goes to"), POSITIVE] = 6
    d_expert: Annotated[int, flag("inner width of an expert; 0: d_model"), NOT_NEGATIVE] = 0
    shared: Annotated[int, flag("experts that every token goes to"), NOT_NEGATIVE] = 2
    router_per_loop: Annotated[bool, flag("a router for each loop; else one for all")] = True
    router_copied: Annotated[
        bool, flag("routers of later loops start as copies of the first; else drawn separately")
    ] = True
    capacity_factor: Annotated[
        float,
        flag("most tokens an expert takes in training, as a multiple of the mean; 0: all"),
        NOT_NEGATIVE,
    ] = 1.5
    z_loss: Annotated[
        float, flag("weight of each visit's mean squared logsumexp of router logits"), NOT_NEGATIVE
    ] = 1e-3
    balance_lr: Annotated[
        float,
        flag("step size of the bias on router scores that balances experts; 0: no bias"),
        NOT_NEGATIVE,
    ] = 2e-3
    balance: Annotated[
        Literal["centred", "released"],
        flag(
            "loads that move the bias: centred, all tokens routed, and its mean stays 0; "
            "released, those within capacity, as LOOM's code"
        ),
    ] = "centred"
    backend: Annotated[
        Literal["grouped_mm", "megablocks", "reference"],
        flag("implementation of the experts' matrix products; reference: a plain loop over them"),
        MAY_CHANGE,
    ] = "grouped_mm"

    def __post_init__(self) -> None:
        check_fields(self, "model.moe.")
        if self.experts > MAX_EXPERTS:
            raise InputError(f"model.moe.experts={self.experts}: must not exceed {MAX_EXPERTS}")
        if self.experts and self.top_k > self.experts:
            raise InputError(
                f"model.moe.top_k={self.top_k}: must not exceed model.moe.experts={self.experts}"
            )


@dataclass(frozen=True)
class LoomConfig:
    """The components of LOOM (arXiv 2610.01153), each a switch; read by `residual` loom alone."""

    strength: Annotated[
        float, flag("lambda of gamma = lambda / (R sqrt K) and g_t = lambda / (t sqrt K)"), POSITIVE
    ] = 0.5
    decay: Annotated[float, flag("decay b of the two moving averages of attention"), FRACTION] = 0.5
    scaling: Annotated[bool, flag("scale branches by gamma; else by 1")] = True
    injection: Annotated[bool, flag("mix the embedding in again from loop 2 on")] = True
    branch_norm: Annotated[bool, flag("RMSNorm after the MoE branch")] = True
    looping_residual: Annotated[
        bool, flag("two moving averages of attention outputs; else the output alone")
    ] = True
    global_source: Annotated[
        Literal["output", "readout"],
        flag("input of the global average: the paper's output or the released code's readout"),
    ] = "output"
    carry: Annotated[
        Literal["raw", "normalised"],
        flag("the stream between loops: unchanged (paper) or normalised (released code)"),
    ] = "raw"

    def __post_init__(self) -> None:
        check_fields(self, "model.loom.")


@dataclass(frozen=True)
class ModelConfig:
    """A looped language model: P + K + C physical blocks, of which K run R = loops times."""

    residual: Annotated[str, flag("residual rule; pre_norm is h + f", choices=RESIDUALS)] = (
        "deeploop"
    )
    d_model: Annotated[int, flag("width of the residual stream"), POSITIVE] = 192
    n_layers: Annotated[
        int, flag("physical blocks K of the loop: attention + SwiGLU or MoE"), POSITIVE
    ] = 2
    loops: Annotated[
        int, flag("loops R in training; the residual scales follow from it", "--loops"), POSITIVE
    ] = 4
    prelude: Annotated[
        int, flag("blocks P before the loop, run once; dense SwiGLU"), NOT_NEGATIVE
    ] = 0
    coda: Annotated[int, flag("blocks C after the loop, run once; dense SwiGLU"), NOT_NEGATIVE] = 0
    start: Annotated[
        Literal["embedding", "noise"],
        flag("state before the first loop: the loops' input, or noise (Huginn)"),
    ] = "embedding"
    start_std: Annotated[
        float, flag("std of the noise of start=noise, a truncated normal"), NOT_NEGATIVE
    ] = 0.4**0.5
    inject: Annotated[
        Literal["none", "add", "convex", "adapter", "contractive"],
        flag("mixing of the loops' input into the state at the start of a loop"),
    ] = "none"
    adapter_init: Annotated[
        Literal["identity", "random"],
        flag("initial map of inject=adapter: [I, 0] passes the state on; random as Huginn's"),
    ] = "identity"
    loop_norm: Annotated[
        Literal["none", "each", "last"],
        flag("the final norm also after each loop (Ouro) or after the last, before the coda"),
    ] = "none"
    input_norm: Annotated[bool, flag("RMSNorm on the loops' input, after the prelude (Parcae)")] = (
        False
    )
    readout_map: Annotated[
        bool, flag("linear map of the state after the loops, at first the identity (Parcae's C)")
    ] = False
    loop_signal: Annotated[
        Literal["none", "add", "modulate"],
        flag("the loop's number, added as a sinusoid (UT) or scaling inputs and outputs"),
    ] = "none"
    depth: Annotated[
        str, flag("depth rule: which tokens take part in a loop; fixed: all", choices=DEPTHS)
    ] = "fixed"
    n_heads: Annotated[int, flag("attention heads; must divide d_model"), POSITIVE] = 3
    d_ff: Annotated[
        int,
        flag("SwiGLU inner width; 0 means 8/3 d_model, rounded up to a multiple of 64"),
        NOT_NEGATIVE,
    ] = 0
    lora_rank: Annotated[
        int,
        flag("rank of the matrices that each loop adds to the shared ones (LoRA); 0: none"),
        NOT_NEGATIVE,
    ] = 0
    vocab_size: Annotated[int, flag("rows of the embedding; 0: the tokenizer's"), NOT_NEGATIVE] = 0
    seq_len: Annotated[int, flag("tokens per training sequence"), POSITIVE] = 128
    p: Annotated[
        float | None,
        flag("exponent p of alpha = (2N)^p and beta = (8N)^-p; None: the rule's default"),
    ] = None
    qk_norm: Annotated[bool, flag("parameter-free RMSNorm on queries and keys")] = False
    rope_base: Annotated[float, flag("RoPE base frequency"), POSITIVE] = 10000.0
    norm_eps: Annotated[float, flag("epsilon of every RMSNorm"), POSITIVE] = 1e-6
    embed_std: Annotated[float, flag("std of the initial embedding"), POSITIVE] = 0.02
    moe: MoEConfig = field(default_factory=MoEConfig)
    loom: LoomConfig = field(default_factory=LoomConfig)
    act: ActConfig = field(default_factory=ActConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    mor: MorConfig = field(default_factory=MorConfig)
    reasoner: ReasonerConfig = field(default_factory=ReasonerConfig)

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        check_choice("model.residual", self.residual, RESIDUALS)
        check_choice("model.depth", self.depth, DEPTHS)
        check_capacities(self)
        reasons = self.reasoner.cycles_high > 0
        if reasons:
            rules = [name for name, choice in RESIDUALS.items() if choice.for_reasoners]
            check_reasoner(self, rules)
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise InputError(
                f"model.n_heads={self.n_heads}: must divide model.d_model={self.d_model} "
                "into heads of an even width"
            )
        if self.lora_rank > self.d_model:
            raise InputError(
                f"model.lora_rank={self.lora_rank}: must not exceed model.d_model={self.d_model}, "
                "the rank of every matrix"
            )
        if self.lora_rank and self.moe.experts:
            raise InputError(
                f"model.lora_rank={self.lora_rank}: a mixture of experts has no adapters; leave "
                "model.lora_rank or model.moe.experts out"
            )
        has_exponent = self.exponent is not None or (reasons and self.reasoner.visits != "plain")
        if self.p is not None and (not has_exponent or not 0 <= self.p <= 2):
            scaled = [name for name, choice in RESIDUALS.items() if choice.exponent is not None]
            raise InputError(
                f"model.p={self.p}: an exponent from 0 to 2 of the rules {' and '.join(scaled)}"
                f" (model.residual={self.residual}), or of a reasoner with model.reasoner.visits"
            )

    @property
    def kind(self) -> str:
        """The kind of model, a name in MODELS."""
        return "reasoner" if self.reasoner.cycles_high else "language"

    def require_loops(self, verb: str) -> None:
        """Refuse a model without loops over tokens; raises InputError. `verb`: of the command."""
        if MODELS[self.kind].puzzles:
            raise InputError(
                f"model.reasoner.cycles_high={self.reasoner.cycles_high}: deeploop {verb} takes "
                "language models; a reasoner has deeploop train, eval and profile"
            )

    @property
    def ff_width(self) -> int:
        """Inner width of a dense SwiGLU."""
        return self.d_ff or 64 * -(-8 * self.d_model // (3 * 64))

    @property
    def n_blocks(self) -> int:
        """N = P + K R + C, the blocks that a token passes in training."""
        return self.prelude + self.n_layers * self.loops + self.coda

    @property
    def exponent(self) -> float | None:
        """p of alpha = (2N)^p and beta = (8N)^-p; None for rules without these scales."""
        default = RESIDUALS[self.residual].exponent
        return default if default is None or self.p is None else self.p

    @property
    def alpha(self) -> float:
        """Run-time residual scale, fixed by the training loops; 1 for rules without."""
        return 1.0 if self.exponent is None else scaling.alpha(self.n_blocks, self.exponent)

    @property
    def beta(self) -> float:
        """Gain on the initial V, O and FFN matrices; 1 for rules without."""
        return 1.0 if self.exponent is None else scaling.beta(self.n_blocks, self.exponent)
