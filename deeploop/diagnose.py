"""What sharing weights over loops does to a model: `deeploop diagnose RUN|PRESET`.

A preset is diagnosed as it begins; a run there and at each checkpoint it kept, all on one
held-out batch, in float32, under full backprop whatever the plan of the run. Written are
diagnose.json and diagnose.png. See `deeploop.alignment` for kappa_R and what it stands on.

The update is the run's own next AdamW step (its moments, learning rate, clipping and decay)
with this batch's gradient, taken on the weights that all loops share and on no others:

    measured   RMS of F(theta + dtheta) - F(theta), F the final normalised states
    bound      sum_j |sum_r U_rj| |dtheta_j|: the most it can be, to first order
    random     sqrt(sum_j |sum_r U_rj|^2 |dtheta_j|^2 / numel theta_j): what steps of these
               lengths in random directions would make it
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deeploop import checkpoint, run, scaling
from deeploop.alignment import (
    Apart,
    Part,
    apart,
    cosines,
    directional,
    gradients,
    gram,
    joint,
    kappas,
    norms,
    run_apart,
)
from deeploop.config import Config, ModelConfig
from deeploop.data import Corpus, load_corpus
from deeploop.device import device_name
from deeploop.disk import disk_errors, user_path, write_json
from deeploop.errors import InputError
from deeploop.lm import LoopLM
from deeploop.loss import linear_cross_entropy
from deeploop.measure import overlap, spread
from deeploop.memory import Live
from deeploop.optim import adamw, clip_gradients, learning_rate, step_if_finite
from deeploop.order import train_batch
from deeploop.parallel import Ranks
from deeploop.start import check_same, check_same_corpus, resolve
from deeploop.visits import Visit


class Batch(NamedTuple):
    """What every reading of a diagnosis is taken on."""

    tokens: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]
    probes: int
    seed: int  # of the probes


class Measured(NamedTuple):
    """One state of a model, still in tensors; parts are 2K branches, then 2K pairs of gains."""

    loss: Tensor  # nats per token
    stream: Tensor  # [R, 2K, 3]: RMS, variance, variance between tokens; see `moments`
    loads: Tensor | None  # int64 [R, K, experts]
    g: Tensor  # float64 [4K, R, R]: Gram matrices of G, by part
    u: Tensor  # float64 [probes, 4K, R, R]: of v^T U, whose mean over probes is that of U
    steps: Tensor  # float64 [4K]: |dtheta| of each part
    sizes: list[int]  # [4K]: numel of each part
    moved: Tensor  # RMS of F(theta + dtheta) - F(theta)


def measure(
    model: LoopLM, optimizer: torch.optim.AdamW, config: Config, step: int, batch: Batch
) -> Measured:
    """Diagnose a model that has taken `step` steps; its weights are then a step further on.

    One graph is kept for 1 + probes backwards. At any time there are the R gradients of
    every sublayer of one of them.
    """
    model.train()  # with the capacity of experts that the trained loss has
    c, views = config.model, apart(model)
    parts = views.branches + views.gains
    shared = {id(p) for part in parts for p in part.own}
    others = [p for p in model.parameters() if id(p) not in shared]
    seen: list[Tensor] = []

    def watch(visit: Visit, h: Tensor) -> None:
        seen.append(moments(h.detach()))

    s = run_apart(model, views.loops, batch.tokens, watch)
    assert s.n is not None
    loss = linear_cross_entropy(s.n, model.head, batch.targets) / batch.targets.numel()
    total = loss if s.z is None else loss + c.moe.z_loss * s.z
    by_part, rest = gradients(total, parts, others)
    g = torch.stack([gram(visits) for visits in by_part])
    hand_over(parts, by_part, others, rest)
    del by_part, rest
    u = torch.stack([*probe(s.n, parts, batch)])
    before = s.n.detach()
    loads = torch.stack(s.loads).view(c.loops, c.n_layers, -1) if s.loads else None
    del s, total
    steps = take_step(model, optimizer, config, step, parts, others)
    return Measured(
        loss.detach(),
        torch.stack(seen).view(c.loops, -1, 3),
        loads,
        g,
        u,
        steps,
        [sum(p.numel() for p in part.own) for part in parts],
        moved(model, views, batch, before),
    )


def moments(h: Tensor) -> Tensor:
    """RMS, variance and variance between tokens of a stream [B, T, d]: float32 [3].

    The second is over the features of a token, the mean over tokens; the third over tokens,
    the mean over features: where it falls to 0 all tokens have become alike.
    """
    x = h.float().flatten(0, -2)
    rms = x.square().mean().sqrt()
    return torch.stack((rms, x.var(-1, correction=0).mean(), x.var(0, correction=0).mean()))


def hand_over(
    parts: list[Part],
    by_part: list[list[list[Tensor]]],
    others: list[nn.Parameter],
    rest: list[Tensor],
) -> None:
    """Give the model its ordinary gradient: of shared parameters the sum over their visits."""
    for part, visits in zip(parts, by_part, strict=True):
        for p, found in zip(part.own, zip(*visits, strict=True), strict=True):
            p.grad = torch.stack(found).sum(0)
    for p, grad in zip(others, rest, strict=True):
        p.grad = grad


def probe(n: Tensor, parts: list[Part], batch: Batch) -> Iterator[Tensor]:
    """Gram matrices of v^T U for one random v after another: float64 [4K, R, R] each."""
    draw = torch.Generator().manual_seed(batch.seed)
    for _ in range(batch.probes):
        v = torch.randn(n.shape, generator=draw, dtype=n.dtype, device="cpu") / n.numel() ** 0.5
        by_part, _ = gradients(n, parts, weight=v.to(n.device))
        yield torch.stack([gram(visits) for visits in by_part])


def take_step(
    model: LoopLM,
    optimizer: torch.optim.AdamW,
    config: Config,
    step: int,
    parts: list[Part],
    others: list[nn.Parameter],
) -> Tensor:
    """The optimizer's step on the shared parameters alone; returns |dtheta| by part, float64."""
    before = [[p.detach().clone() for p in part.own] for part in parts]
    norm = clip_gradients(model, config.train.clip)
    for p in others:
        p.grad = None
    step_if_finite(optimizer, norm, rate(config, step))
    optimizer.zero_grad(set_to_none=True)
    changes = (
        [p.detach() - b for p, b in zip(part.own, old, strict=True)]
        for part, old in zip(parts, before, strict=True)
    )
    return torch.stack([nn.utils.get_total_norm(change).double().cpu() for change in changes])


def rate(config: Config, step: int) -> float:
    """The learning rate of the step after `step`; behind a run's last one, of that."""
    return learning_rate(min(step, config.train.steps - 1), config.train)


@torch.no_grad()
def moved(model: LoopLM, views: Apart, batch: Batch, before: Tensor) -> Tensor:
    """RMS of the change of the final states."""
    n = run_apart(model, views.loops, batch.tokens).n
    assert n is not None
    return (n - before).double().square().mean().sqrt()


def figures(m: Measured, config: Config, step: int) -> dict[str, Any]:
    """What diagnose.json says of one state."""
    c, u = config.model, m.u.mean(0)
    branches = 2 * c.n_layers
    by_sublayer = kappas(u[:branches], m.g[:branches])
    worst = int(by_sublayer.argmax())
    kappa = float(by_sublayer[worst])
    gamma = scaling.alignment_growth(kappa, c.loops) if c.loops > 1 and kappa > 0 else None
    found: dict[str, Any] = {
        "step": step,
        "loss": float(m.loss),
        "kappa": kappa,
        "kappa_by_probe": [float(kappas(p[:branches], m.g[:branches]).max()) for p in m.u],
        "kappa_directional": float(directional(u[:branches], m.g[:branches]).max()),
        "gamma": gamma,
        "p": None if gamma is None else scaling.threshold_exponent(gamma),
        "sublayer": sublayer_name(c, worst),
        "cosine": apart_mean(cosines(m.g[:branches]).mean(0)),
        "c_u": float(norms(u[:branches]).max()) * c.alpha / c.beta,
        "c_g": float(norms(m.g[:branches]).max()) * c.alpha / c.beta,
        "branches": sharing(c, u[:branches], m.g[:branches]),
        "gains": sharing(c, u[branches:], m.g[branches:]),
        "update": update_size(m, u, rate(config, step)),
    }
    for i, name in enumerate(("rms", "variance", "variance_between_tokens")):
        found[name] = m.stream[..., i].tolist()
    if c.exponent is not None:
        found["budget"] = budget(c, kappa)
    if m.loads is not None:
        found |= {
            "loads": m.loads.tolist(),
            "router_overlap": overlap(m.loads.cpu()).tolist(),
            "load_spread": spread(m.loads.cpu()).tolist(),
        }
    return found


def sharing(c: ModelConfig, u: Tensor, g: Tensor) -> list[dict[str, Any]]:
    """By sublayer: its kappas, its visits' norms and those of their sums, cosines of G and U."""
    columns = {
        "kappa": kappas(u, g),
        "kappa_directional": directional(u, g),
        "g": norms(g),
        "g_sum": joint(g),
        "g_cosines": cosines(g),
        "u": norms(u),
        "u_sum": joint(u),
        "u_cosines": cosines(u),
    }
    return [
        {"sublayer": sublayer_name(c, j)} | {key: x[j].tolist() for key, x in columns.items()}
        for j in range(len(g))
    ]


def sublayer_name(c: ModelConfig, j: int) -> str:
    kind = ("MoE" if c.moe.experts else "SwiGLU") if j % 2 else "attention"
    return f"{j // 2 + 1} {kind}"


def apart_mean(matrix: Tensor) -> float | None:
    """Mean over pairs of different loops; None where there is one loop."""
    R = len(matrix)
    return float((matrix.sum() - matrix.trace()) / (R * (R - 1))) if R > 1 else None


def update_size(m: Measured, u: Tensor, lr: float) -> dict[str, float]:
    """The step's effect, and what it is held against; see the top of this file."""
    sizes = torch.tensor(m.sizes, dtype=torch.float64).clamp_min(1)
    bound = (joint(u) * m.steps).sum()
    return {
        "lr": lr,
        "measured": float(m.moved),
        "bound": float(bound),
        "bound_untied": float((norms(u).sum(-1) * m.steps).sum()),
        "random": float((joint(u).square() * m.steps.square() / sizes).sum().sqrt()),
        "measured_over_bound": float(m.moved / bound),
    }


def budget(c: ModelConfig, kappa: float) -> dict[str, float]:
    """M kappa_R (beta/alpha)^2, beside what it is with no alignment and with all of it."""
    assert c.exponent is not None
    untied = scaling.untied_budget(c.n_layers * c.loops, c.exponent)
    aligned = scaling.aligned_budget(c.n_layers, c.loops, c.exponent)
    return {"measured": kappa * untied, "untied": untied, "aligned": aligned}


def peak(config: Config, rows: int) -> int:
    """Bytes that a diagnosis of `rows` sequences holds at once, counted; none allocated."""
    m = config.model
    with FakeTensorMode(allow_non_fake_inputs=False), Live() as live:
        with torch.device(config.train.device):
            model = LoopLM(m)
            tokens = torch.zeros(rows, m.seq_len, dtype=torch.int64)
        measure(model, adamw(model, config.train), config, 0, Batch(tokens, tokens, 1, 0))
        return live.peak


def checkpoints(path: str) -> list[checkpoint.Checkpoint]:
    """The checkpoint at `path`, or all that the run there has kept, oldest first."""
    found = checkpoint.find(path)
    if user_path(path, "run").resolve() == found.path.resolve():
        return [found]
    return [checkpoint.find(str(step)) for step in checkpoint.steps(found.run)]


def states(
    config: Config, found: list[checkpoint.Checkpoint]
) -> Iterator[tuple[int, LoopLM, torch.optim.AdamW]]:
    """(step, model, optimizer) of the model as training begins, and of each checkpoint."""
    for saved in (None, *found):
        torch.manual_seed(config.train.seed)
        model = LoopLM(config.model).to(config.train.device)
        optimizer = adamw(model, config.train)
        if saved is not None:
            checkpoint.load_model(saved, model)
            checkpoint.load_optimizer(saved, optimizer)
        yield 0 if saved is None else saved.step, model, optimizer


def draw_batch(corpus: Corpus, config: Config, rows: int, probes: int, seed: int) -> Batch:
    """Held-out sequences, drawn by the seed alone."""
    length = config.model.seq_len
    if len(corpus.val) <= length:
        raise InputError(
            f"data.path={config.data.path!r}: {len(corpus.val)} held-out tokens are fewer than "
            f"one sequence and its target ({length + 1}); give more text or a larger "
            "data.val_fraction"
        )
    tokens, targets = train_batch(
        corpus.val, seed=seed, step=0, global_batch=rows, seq_len=length, rows=range(rows)
    )
    device = config.train.device
    return Batch(tokens.to(device), targets.to(device), probes, seed)


def diagnose(
    config: Config,
    found: list[checkpoint.Checkpoint],
    console: Console,
    *,
    probes: int = 4,
    batch_size: int = 0,
    draw: int = 0,
) -> list[dict[str, Any]]:
    """Diagnose a preset as it begins, or a run's checkpoints; returns what diagnose.json holds.

    batch_size sequences (0: the run's micro-batch) and `probes` probes are drawn by `draw`.
    Raises InputError for what cannot be diagnosed, before anything is written.
    """
    for name, value, least in (("probes", probes, 1), ("batch_size", batch_size, 0)):
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")
    corpus = load_corpus(
        config.data.path,
        config.data.tokenizer,
        text_field=config.data.text_field,
        val_fraction=config.data.val_fraction,
        vocab_size=config.model.vocab_size or None,
    )
    for saved in found:
        check_same(config, saved)
        check_same_corpus(corpus, saved)
    config = exact(config, corpus)
    t = config.train
    rows = batch_size or t.micro_batch or t.batch_size
    batch = draw_batch(corpus, config, rows, probes, draw)
    if t.out or not found:
        folder = user_path(t.out, "train.out") if t.out else run.choose(config)
    else:
        folder = found[0].run
    for line in describe(config, batch):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    readings = []
    for step, model, optimizer in states(config, found):
        measured = measure(model, optimizer, config, step, batch)
        readings.append(figures(measured, config, step))
    console.print(table(readings))
    write(folder, config, batch, readings)
    console.print(
        f"wrote    {folder}/diagnose.json and diagnose.png", highlight=False, markup=False
    )
    return readings


def exact(config: Config, corpus: Corpus) -> Config:
    """The run's configuration in float32 and eager; megablocks' experts by the plain loop."""
    config = config.replace("train", precision="fp32", compile=False)
    if config.model.moe.backend == "megablocks":
        config = config.replace("model.moe", backend="loop")
    return resolve(config, corpus, Ranks())


def describe(config: Config, batch: Batch) -> list[str]:
    """What is diagnosed, on what, and what it takes."""
    m, t = config.model, config.train
    rows, length = batch.tokens.shape
    size = peak(config, rows) / 2**30
    plan = "" if t.plan == "full" else f" (the run trains under {t.plan})"
    return [
        f"model    {config.preset}: {m.arm}, {m.n_layers} blocks x {m.loops} loops, width "
        f"{m.d_model}",
        f"batch    {rows} x {length} held-out tokens; gradients: full backprop, float32{plan}",
        f"cost     {1 + batch.probes} backwards and 2 forwards a checkpoint, {size:.2f} GiB "
        f"(counted) on {device_name(batch.tokens.device)}",
    ]


def table(readings: list[dict[str, Any]]) -> Table:
    """A row for each state."""
    made = Table(box=None, padding=(0, 1, 0, 0))
    names = ("step", "loss", "kappa", "gamma", "p", "direct.", "cosine", "rms", "moved", "/bound")
    for name in names:
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("largest at", no_wrap=True)
    for r in readings:
        values = (
            r["kappa"], r["gamma"], r["p"], r["kappa_directional"], r["cosine"], r["rms"][-1][-1],
        )  # fmt: skip
        made.add_row(
            str(r["step"]),
            f"{r['loss']:.3f}",
            *("-" if x is None else f"{x:.2f}" for x in values),
            f"{r['update']['measured']:.1e}",
            f"{r['update']['measured_over_bound']:.3f}",
            r["sublayer"],
        )
    return made


def write(folder: Path, config: Config, batch: Batch, readings: list[dict[str, Any]]) -> None:
    """diagnose.json and diagnose.png."""
    with disk_errors(f"folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    rows, length = batch.tokens.shape
    about = {
        "preset": config.preset,
        "arm": config.model.arm,
        "n_layers": config.model.n_layers,
        "loops": config.model.loops,
        "sequences": rows,
        "seq_len": length,
        "probes": batch.probes,
        "draw": batch.seed,
        "torch": torch.__version__,
    }
    write_json(folder / "diagnose.json", about | {"readings": readings})
    from deeploop import plots  # matplotlib is slow to import

    plots.diagnosis(readings, folder / "diagnose.png")
