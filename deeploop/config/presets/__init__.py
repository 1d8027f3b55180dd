"""Configurations by name: the papers' models, and small ones that train on a CPU."""

import dataclasses
import difflib

from deeploop.config import Arm, Config, DataConfig, ModelConfig, MoEConfig, TrainConfig
from deeploop.utils.errors import InputError


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
            residual=arm,
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
            micro_batch=12 if (size, loops) == ("medium", 7) else 16,  # 16 is over 141 GB
            lr=1e-3,
            schedule="cosine",
            warmup=0.02,
            decay=0.0,
            eval_every=1000,
            eval_tokens=2**20,
            save_every=1000,
        ),
    )


ALL_OFF = {
    "scaling": False, "injection": False, "branch_norm": False, "looping_residual": False,
}  # fmt: skip

# Arms of LOOM's ablation: fields of LoomConfig, and whether each loop has its router.
LOOM_ABLATIONS: dict[str, tuple[dict[str, bool], bool]] = {
    "native": (ALL_OFF, False),
    "scaling-only": (ALL_OFF | {"scaling": True}, False),
    "injection-only": (ALL_OFF | {"injection": True}, False),
    "no-scaling": ({"scaling": False}, True),
    "no-injection": ({"injection": False}, True),
    "no-branch-norm": ({"branch_norm": False}, True),
    "no-looping-residual": ({"looping_residual": False}, True),
    "shared-router": ({}, False),
}


def _loom(
    name: str, d_model: int, n_layers: int, loops: int, moe: MoEConfig, *,
    head_dim: int = 64, lr: float, steps: int, micro_batch: int = 16,
) -> Config:  # fmt: skip
    """A model of LOOM (arXiv 2610.01153): batches of 1024 x 1024 tokens, segments of 3 loops.

    The head width is ours: the paper's was not to be had. The embedding has a standard
    deviation of d^-1/2 and is divided by it, the head is a matrix of its own, the 49,152
    rows are SmolLM's tokenizer's (give its tokenizer.json as data.tokenizer). Loops are
    the most the paper trains; its ablation has 9 (--model.loops 9).
    """
    return Config(
        preset=name,
        model=ModelConfig(
            residual="loom",
            d_model=d_model,
            n_layers=n_layers,
            loops=loops,
            n_heads=d_model // head_dim,
            vocab_size=49152,
            seq_len=1024,
            embed_std=d_model**-0.5,
            moe=moe,
        ),
        train=TrainConfig(
            steps=steps,
            batch_size=1024,
            micro_batch=micro_batch,
            backprop="segments",
            lr=lr,
            min_lr=0.1,
            eval_every=500,
            eval_tokens=2**20,
            save_every=500,
        ),
    )


def _loom_sizes() -> list[Config]:
    """LOOM's sizes, in the paper's reading.

    Widths of the experts are what the stated parameter counts leave for them (329M, 1.7B).
    Of the 100M model only the count and lr are known, and that it may have 24 experts: its
    d, M, heads and widths are ours. Of the 700M one, M, d and the number of experts are a
    fit to its count, and lr is that of the 329M model.
    """
    moe = MoEConfig(experts=30, top_k=6, shared=2)
    sizes = [
        _loom_tiny(),
        _loom("loom-100m", 320, 10, 12, dataclasses.replace(moe, experts=24, d_expert=256),
              lr=4e-4, steps=10_000),
        _loom("loom-329m", 512, 10, 12, dataclasses.replace(moe, d_expert=544),
              lr=2e-4, steps=10_000),
        _loom("loom-1.7b", 1280, 15, 9, dataclasses.replace(moe, d_expert=800),
              lr=6e-5, steps=57_000, micro_batch=8),
    ]  # fmt: skip
    for loops in range(1, 7):
        routed = isoflop_top_k(loops) - 2
        experts = MoEConfig(experts=78, top_k=routed, d_expert=512, shared=2)
        name = f"loom-700m-isoflop-h{loops}"
        sizes.append(_loom(name, 512, 10, loops, experts, lr=2e-4, steps=10_000))
    return sizes


def isoflop_cost(loops: int, top_k: int) -> int:
    """LOOM's f(H, k) = H (6 + 3k), in d^2 per token and layer; k counts the shared experts."""
    return loops * (6 + 3 * top_k)


def isoflop_top_k(loops: int, cost: int = 84) -> int:
    """Experts per token at which `loops` loops cost nearest to f = 84."""
    return min(range(3, 64), key=lambda k: abs(isoflop_cost(loops, k) - cost))


def _loom_tiny() -> Config:
    """Trains on two CPU cores in minutes; no paper's."""
    return Config(
        preset="loom-tiny",
        model=ModelConfig(
            residual="loom",
            d_model=128,
            n_layers=2,
            loops=6,
            n_heads=2,
            embed_std=128**-0.5,
            moe=MoEConfig(experts=8, top_k=2, d_expert=128, shared=1),
        ),
        train=TrainConfig(steps=100, backprop="segments", lr=2e-3, min_lr=0.1),
    )


def _readings(base: Config) -> list[Config]:
    """The paper's reading, the released code's, and the arms of the ablation.

    The released code feeds the global average the local readout, normalises the stream
    after every loop, never adds its z-loss to the loss, decays norm gains and warms the
    1.7B model up over 1% of the steps. Where the paper's summary is silent, its reading
    has what the code has: the balancing bias, a last learning rate of a tenth, routers
    that begin as copies. Not followed in either: gradients summed over ranks without
    division (clipping would then depend on their number), the guard that aborts on a
    spike, attention that stops at document ends, weights in bfloat16. Which router the
    partial arms have is our guess: one for all loops.
    """
    released = base.replace("model.loom", global_source="readout", carry="normalised")
    released = released.replace("model.moe", z_loss=0.0).replace("train", decay_gains=True)
    if base.preset == "loom-1.7b":
        released = released.replace("train", warmup=0.01)
    found = {"": base, "-released": released}
    for arm, (parts, per_loop) in LOOM_ABLATIONS.items():
        changed = base.replace("model.loom", **parts)
        found[f"-{arm}"] = changed.replace("model.moe", router_per_loop=per_loop)
    return [
        dataclasses.replace(config, preset=base.preset + suffix) for suffix, config in found.items()
    ]


def presets() -> dict[str, Config]:
    """Every named configuration."""
    named = [Config(preset="deeploop-tiny")]
    named += [
        _gpt2(size, loops, arm)
        for size in ("small", "medium")
        for loops in (1, 3, 5, 7)
        for arm in ("baseline", "deeploop")
    ]
    for base in _loom_sizes():
        named += _readings(base)
    return {config.preset: config for config in named}


SUMMARY = (
    "deeploop-tiny, gpt2-{small,medium}-r{1,3,5,7}-{baseline,deeploop}, "
    "loom-{tiny,100m,329m,1.7b,700m-isoflop-h1..6}, each loom also with "
    "-released or an arm of the ablation: " + ", ".join(f"-{arm}" for arm in LOOM_ABLATIONS)
)


def preset(name: str) -> Config:
    """One preset by name; raises InputError with the nearest names."""
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        others = f"did you mean {', '.join(near)}?" if near else f"there are {SUMMARY}"
        raise InputError(f"preset {name!r}: unknown; {others}")
    return known[name]
