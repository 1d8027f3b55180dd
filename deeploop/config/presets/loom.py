"""The models of LOOM (arXiv 2610.01153), its released code's reading, and its ablations."""

import dataclasses

from deeploop.config import Config, ModelConfig, MoEConfig, TrainConfig

ALL_OFF = {
    "scaling": False, "injection": False, "branch_norm": False, "looping_residual": False,
}  # fmt: skip

# LOOM's ablations: fields of LoomConfig, and whether each loop has a router of its own.
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
    """Return a model of LOOM: batches of 1024 x 1024 tokens, segments of 3 loops.

    The head width is our choice, as the paper does not state it. The embedding has a standard
    deviation of d^-1/2 and is divided by it, the head is a separate matrix, and the vocabulary
    of 49,152 is that of SmolLM's tokenizer (give its tokenizer.json as data.tokenizer). `loops`
    is the largest count the paper trains; its ablation has 9 (--loops 9).
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
    """List LOOM's sizes, in the paper's reading.

    The experts' widths follow from the stated parameter counts (329M, 1.7B). Of the 100M model
    only the parameter count, lr and the 24 experts are known: d, M, heads and widths are our
    choice. Of the 700M model M, d and the number of experts are a fit to its parameter count,
    and lr is that of the 329M model.
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
    """Return LOOM's cost f(H, k) = H (6 + 3k), in d^2 a token and layer; k counts all experts."""
    return loops * (6 + 3 * top_k)


def isoflop_top_k(loops: int, cost: int = 84) -> int:
    """Return the experts per token at which the cost of `loops` loops is nearest to f = 84."""
    return min(range(3, 64), key=lambda k: abs(isoflop_cost(loops, k) - cost))


def _loom_tiny() -> Config:
    """Return a model that trains on two CPU cores in minutes; it is in no paper."""
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
    """List a model in the paper's reading, in the released code's reading, and its ablations.

    The released code feeds the global average the local readout, normalises the stream after
    every loop, never adds its z-loss to the loss, moves the balancing bias by the loads within
    capacity, decays norm gains and warms the 1.7B model up over 1% of the steps. Where the paper
    is silent, its reading follows the code: the balancing bias, a final learning rate of a tenth,
    routers that start as copies. Followed in neither: gradients summed over ranks without
    division (clipping would then depend on their number), the guard that aborts on a loss spike,
    attention that stops at document ends, weights in bfloat16, router scores rounded to bfloat16
    before the choice of experts and divided by a sum of at least 1e-9, experts summed in the
    branch's dtype, held-out loss with a capacity. The partial ablations (`-only`) share one
    router between all loops, which is our guess.
    """
    released = base.replace("model.loom", global_source="readout", carry="normalised")
    released = released.replace("model.moe", z_loss=0.0, balance="released")
    released = released.replace("train", decay_gains=True)
    if base.preset == "loom-1.7b":
        released = released.replace("train", warmup=0.01)
    variants = {"": base, "-released": released}
    for ablation, (fields, per_loop) in LOOM_ABLATIONS.items():
        changed = base.replace("model.loom", **fields)
        variants[f"-{ablation}"] = changed.replace("model.moe", router_per_loop=per_loop)
    return [
        dataclasses.replace(config, preset=base.preset + suffix)
        for suffix, config in variants.items()
    ]


def loom_presets() -> list[Config]:
    """List every size of LOOM with its released reading and ablations."""
    return [variant for base in _loom_sizes() for variant in _readings(base)]
