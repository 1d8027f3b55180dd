"""Describe a run in the lines that its log starts with."""

import operator
from typing import TYPE_CHECKING

from deeploop.config import Config
from deeploop.config.backprop import optimizer_steps
from deeploop.config.depth import DEPTHS
from deeploop.config.fields import entries
from deeploop.config.loop_count import mean_loops
from deeploop.config.model import RESIDUALS
from deeploop.model.looplm import count_parameters
from deeploop.train.parents import describe_parents
from deeploop.utils.device import device_name

if TYPE_CHECKING:
    from deeploop.train.language import LanguageTrainer

# Fields that one value of another field of the model or of training alone reads.
USED_WITH = {
    "model.start_std": "start=noise",
    "model.adapter_init": "inject=adapter",
    "model.n_layers": "reasoner.cycles_high=0",
    "model.loops": "reasoner.cycles_high=0",
    "model.embed_std": "reasoner.cycles_high=0",
    "model.reasoner.layers_high": "reasoner.shared=False",
    "model.reasoner.mixer_width": "reasoner.mixer=mlp",
    "model.reasoner.scale_per": "reasoner.visits=paper|counted",
    "model.mor.capacity": "depth=expert_choice",
    "model.mor.causal": "depth=expert_choice",
    "model.mor.causal_weight": "depth=expert_choice",
    "model.mor.score": "depth=token_choice",
    "model.mor.balance": "depth=token_choice",
    "model.mor.z_loss": "depth=token_choice",
    "train.backprop_loops": "backprop=segments|last",
    "train.progressive_weight": "backprop=progressive",
    "train.loop_sigma": "loop_count=poisson",
    "train.loop_set": "loop_count=set",
    "train.exit_weight": "loss=expected|ponder",
    "train.exit_prior": "loss=ponder",
    "train.min_lr": "schedule=wsd|cosine",
}

BORDERS = ("start", "input_norm", "inject", "loop_norm", "readout_map", "loop_signal", "depth")


def describe(trainer: "LanguageTrainer") -> list[str]:
    """Return the log's first lines: the model, the data and the implementations that run."""
    c, m = trainer.config, trainer.config.model
    kernels = "Triton kernels" if trainer.device.type == "cuda" else "closed forms in PyTorch"
    blocks = f"{m.n_layers} blocks x {m.loops} loops"
    if m.prelude or m.coda:
        blocks = f"{m.prelude} + {m.n_layers} x {m.loops} loops + {m.coda} blocks"
    scales = trainer.model.rule.describe()
    scale = f", {scales}" if scales else ""
    borders = "".join(
        f", {name.replace('_', ' ')} {value}"
        for name in BORDERS
        if (value := getattr(m, name)) != getattr(type(m)(), name)
    )
    adapters = f", LoRA rank {m.lora_rank} in each loop" if m.lora_rank else ""
    experts = ""
    if m.moe.experts:
        e = m.moe
        experts = f"; experts: {e.backend}, {e.top_k} of {e.experts} + {e.shared} shared"
    return [
        f"model    {c.preset}: {m.residual}, {blocks}, "
        f"width {m.d_model}, {count_parameters(trainer.model):,} parameters"
        f"{scale}{adapters}{borders}",
        f"data     {trainer.corpus.describe()}",
        f"paths    {device_name(trainer.device)}, {c.train.precision}; updates: {kernels}; "
        f"attention: PyTorch{experts}; loss: chunked cross-entropy"
        f"{'; branches compiled' if c.train.compile else ''}",
        f"backprop {describe_backprop(trainer)}",
        *describe_parents(c),
        *(f"unused   {name}" for name in without_effect(c)),
        f"run      {trainer.folder}",
    ]


def without_effect(config: Config) -> list[str]:
    """Return a line for each field that was set but that another field leaves without effect."""
    m = config.model
    reasons = {
        choice.section: f"model.{field}={name}"
        for field, name, choices in (
            ("residual", m.residual, RESIDUALS), ("depth", m.depth, DEPTHS),
        )
        for choice in choices.values()
        if choice.section and choice.section != choices[name].section
    }  # fmt: skip
    if not m.reasoner.cycles_high:
        reasons["reasoner"] = "model.reasoner.cycles_high=0"
    if not m.moe.experts:
        reasons["moe"] = "model.moe.experts=0"
    lines = {
        e.name: f"{e.name}={e.value}: no effect with {reason}"
        for name, reason in reasons.items()
        for e, default in zip(
            entries(getattr(m, name), f"model.{name}."),
            entries(type(getattr(m, name))()),
            strict=True,
        )
        if e.value != default.value
    }
    for name, needed in USED_WITH.items():
        section, _, path = name.partition(".")
        mine, field, (needed_field, values) = (
            getattr(config, section), operator.attrgetter(path), needed.split("=")
        )  # fmt: skip
        value, other = field(mine), str(operator.attrgetter(needed_field)(mine))
        if value != field(type(mine)()) and other not in values.split("|"):
            lines.setdefault(name, f"{name}={value}: no effect without {section}.{needed}")
    name, t = "train.teacher_weight", config.train
    if not t.teacher and t.teacher_weight != type(t)().teacher_weight:
        lines[name] = f"{name}={t.teacher_weight}: no effect without train.teacher"
    return list(lines.values())


def describe_backprop(trainer: "LanguageTrainer") -> str:
    """Return how far gradients go, how often the optimizer steps, what is recomputed."""
    t, loops = trainer.config.train, trainer.config.model.loops
    groups = optimizer_steps(t, loops)
    steps = len(groups)
    spans = [f"{s.loops.start + 1}-{s.loops.stop}" for group in groups for s in group]
    drawn = t.loop_count != "fixed"
    k = f"every {t.backprop_loops} loops" if drawn else f"loops {', '.join(spans)}"
    last = f"the last {t.backprop_loops} loops" if drawn else f"loops {spans[0]} of {loops}"
    line = {
        "full": "full",
        "segments": f"segments: {k}",
        "last": f"last: gradients through {last}",
        "progressive": f"progressive, weight {t.progressive_weight:g}, and full",
    }[t.backprop]
    line += f"; {steps} optimizer step{'s' if steps > 1 else ''} a batch" if not drawn else ""
    line += f"; loss {t.loss}" if t.loss != "last" else ""
    if drawn:
        mean = mean_loops(t, loops)
        line += f"; loops drawn ({t.loop_count}, mean {mean:g}) for each {t.loop_count_per}"
    if t.recompute != "none":
        line += f", each {t.recompute} run again in backward"
    return line + (f", {trainer.ranks.world} ranks" if trainer.ranks.world > 1 else "")
