"""Two steps under every plan, on as many ranks as the environment says; results to a file."""

import io
from pathlib import Path

import torch
from rich.console import Console

from deeploop.config import Config, DataConfig, LoomConfig, ModelConfig, MoEConfig, TrainConfig
from deeploop.model.moe.layer import MoE
from deeploop.train.setup import open_run
from deeploop.utils.distributed import Ranks, init_distributed

PLANS = {
    "full": {},
    "segments": {"backprop": "segments", "backprop_loops": 2},
    "segments, one step": {"backprop": "segments", "backprop_loops": 2, "step_per": "batch"},
    "last": {"backprop": "last", "backprop_loops": 2},
    "drawn": {"backprop": "last", "backprop_loops": 2, "loop_count": "poisson", "seed": 4},
    "recomputed": {"backprop": "segments", "backprop_loops": 2, "recompute": "visit"},
}
MICRO = {"no accumulation": 4, "accumulation": 2}  # of a global batch of 8, 4 a rank of two
DTYPES = {"float64": torch.float64, "float32": torch.float32}
CASES = [
    (plan, micro, dtype)
    for plan in PLANS
    for micro in MICRO
    for dtype in DTYPES
    if (dtype == "float64" and (micro == "accumulation" or plan in ("full", "segments", "drawn")))
    or (micro == "accumulation" and plan == "segments")
]


def config(corpus: str, out: Path, micro: int, plan: dict) -> Config:
    return Config(
        preset="test",
        model=ModelConfig(
            residual="loom", d_model=16, n_layers=2, loops=3, n_heads=2, seq_len=16, embed_std=0.25,
            moe=MoEConfig(experts=4, top_k=2, d_expert=8, shared=1, capacity_factor=1.0),
            loom=LoomConfig(),
        ),
        data=DataConfig(path=corpus),
        train=TrainConfig(
            steps=100, batch_size=8, micro_batch=micro, precision="fp32", device="cpu", lr=1e-2,
            out=str(out), **plan,
        ),
    )  # fmt: skip


def train_one(run: Config, place: Ranks, dtype: torch.dtype) -> dict:
    """Losses of steps 2 and 3, then weights, biases and the loads of the last step."""
    trainer = open_run(run, Console(file=io.StringIO()), ranks=place)
    trainer.model.to(dtype)
    trainer.done, losses = 1, []
    for _ in range(2):
        metrics = trainer.step()
        losses.append(torch.stack(list(metrics.losses.values())))
    trainer.lock.close()
    moes = [s.branch for s in trainer.model.sublayers if isinstance(s.branch, MoE)]
    return {
        "losses": torch.stack(losses),
        "weights": {n: p.detach() for n, p in trainer.model.named_parameters()},
        "biases": [m.bias for m in moes],
        "loads": metrics.loads,
        "z": metrics.z,
        "grad_norm": metrics.grad_norm,
        "validation": trainer_validation(trainer),
    }


def trainer_validation(trainer) -> dict:
    """Held-out losses by loops; those of the model's own number from a pass of their own, too."""
    from deeploop.eval.validate import validate, validate_after

    given = 4, trainer.config.train.precision, 9 * 16, trainer.ranks  # 4 + 4 + 1 sequences
    losses = validate_after(trainer.model, trainer.corpus, [1, 5], *given)
    return losses | {0: validate(trainer.model, trainer.corpus, *given)}


def train_all(corpus: str, folder: Path, place: Ranks) -> dict:
    return {
        (plan, micro, dtype): train_one(
            config(corpus, folder / f"{plan}-{micro}-{dtype}", MICRO[micro], PLANS[plan]),
            place,
            DTYPES[dtype],
        )
        for plan, micro, dtype in CASES
    }


def save_all(corpus: str, folder: str) -> None:
    """Write what `train_all` returns on this rank N to rank-N.pt in the folder."""
    with init_distributed() as place:
        torch.save(train_all(corpus, Path(folder), place), Path(folder, f"rank-{place.rank}.pt"))
