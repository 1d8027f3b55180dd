"""The trainer on LOOM: optimizer steps by segment, balance, figures, resume, a NaN in a segment."""

import json
import math

import pytest
import torch

from deeploop.config import ModelConfig, MoEConfig
from deeploop.model.moe.layer import MoE
from deeploop.runs import checkpoint
from deeploop.train.describe import describe, without_effect
from deeploop.train.metrics import load_spread, router_overlap
from deeploop.train.optim import learning_rate
from deeploop.train.progress import ProgressBar
from deeploop.train.setup import open_run
from deeploop.utils.errors import Diverged, InputError


@pytest.fixture
def loom(config):
    """Four loops of one block, in segments of two; 4 sequences in two micro-batches."""
    model = ModelConfig(
        residual="loom", d_model=16, n_layers=1, loops=4, n_heads=2, seq_len=16, embed_std=0.25,
        moe=MoEConfig(experts=4, top_k=2, d_expert=8, shared=1),
    )  # fmt: skip
    config = config.replace("train", backprop="segments", backprop_loops=2, micro_batch=2)
    return config.replace("model", **vars(model))


def experts(trainer) -> MoE:
    return trainer.model.sublayers[1].branch


def taken(trainer, parameter) -> int:
    """Optimizer steps a parameter has had."""
    return int(trainer.optimizer.state[parameter]["step"])


@pytest.mark.parametrize(("step_per", "steps"), [("segment", 2), ("batch", 1)])
def test_an_optimizer_step_for_each_segment_or_batch(loom, quiet, step_per, steps):
    """Both at the rate of the global step; a router steps with its own segment alone."""
    trainer = open_run(loom.replace("train", step_per=step_per), quiet)
    rates = []
    whole = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        rates.append(trainer.optimizer.param_groups[0]["lr"]),
        whole(),
    )
    trainer.done = 3
    trainer.step(observe=False)
    assert rates == [learning_rate(3, trainer.config.train)] * steps
    assert taken(trainer, trainer.model.embed_tokens.weight) == steps
    assert [taken(trainer, r) for r in experts(trainer).routers] == [1, 1, 1, 1]
    assert f"{steps} optimizer step" in "\n".join(describe(trainer))


def test_a_step_per_batch_adds_the_segments_gradients(loom, quiet, tmp_path):
    """One AdamW step on the sum of the segments' gradients at the same weights."""
    trainer = open_run(loom.replace("train", step_per="batch", clip=0.0), quiet)
    trainer.optimizer.zero_grad = lambda set_to_none: None
    trainer.optimizer.step = lambda: None
    trainer.step(observe=False)
    together = [p.grad for p in trainer.model.parameters()]
    apart = open_run(loom.replace("train", clip=0.0, out=str(tmp_path / "apart")), quiet)
    apart.optimizer.zero_grad = lambda set_to_none: None
    apart.optimizer.step = lambda: None
    apart.step(observe=False)
    for a, p in zip(together, apart.model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-7)


def test_balance_moves_the_bias_once_a_step_by_the_whole_load(loom, quiet):
    trainer = open_run(loom, quiet)
    moe, lr = experts(trainer), trainer.config.model.moe.balance_lr
    tally = trainer.step(observe=False)
    assert tally.loads.shape == (4, 1, 4)
    assert tally.loads.sum() == 4 * 4 * 16 * 2  # loops, sequences, tokens, top_k
    load = tally.loads.sum((0, 1)).double()
    torch.testing.assert_close(moe.bias, (lr * (load.mean() - load).sign()).float())
    assert moe.bias.abs().max() == pytest.approx(2e-3)


def test_without_its_rate_the_bias_stays(loom, quiet):
    trainer = open_run(loom.replace("model.moe", balance_lr=0.0), quiet)
    trainer.step(observe=False)
    assert not experts(trainer).bias.any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_exact(loom, quiet, tmp_path, precision):
    """To the bit: weights, moments, and the biases that no optimizer holds."""
    loom = loom.replace("train", precision=precision)
    straight = open_run(loom, quiet)
    straight.fit()
    half = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000010"))
    resumed = open_run(half.config.replace("train", out=str(tmp_path / "fork")), quiet, half)
    resumed.fit()
    assert experts(straight).bias.any()
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_the_log_holds_what_looms_figures_show(loom, quiet, tmp_path):
    open_run(loom, quiet).fit()
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [m for m in lines if "loss" in m]
    for m in logged:
        assert len(m["residual_rms"]) == len(m["load_spread"]) == 4
        assert len(m["segment_losses"]) == 2 and m["segment_losses"][-1] == m["loss"]
        matrix = torch.tensor(m["router_overlap"])
        torch.testing.assert_close(matrix.diagonal(), torch.ones(4))
        torch.testing.assert_close(matrix, matrix.T)
        assert m["z"] > 0
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert (tmp_path / "run" / "loops.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("plan", "depth"), [("full", "fixed"), ("segments", "fixed"), ("last", "fixed"),
                        ("full", "expert_choice")],
)  # fmt: skip
def test_dropped_slots_are_those_that_weigh_nothing(loom, quiet, plan, depth):
    """In every loop and micro-batch, loops without gradient and of some tokens among them."""
    config = loom.replace("train", backprop=plan).replace("model.moe", capacity_factor=0.75)
    config = config.replace("model", depth=depth).replace("model.mor", capacity="1,1,.5,.5")
    trainer = open_run(config, quiet)
    moe, seen = experts(trainer), []
    moe.register_forward_hook(lambda _, __, routed: seen.append((routed.slots < 0).flatten()))
    figures = trainer.step(observe=True).figures()
    assert len(seen) == 8  # loops x micro-batches
    share = torch.cat(seen).float().mean().item()
    assert share > 0.1 and figures["dropped"] == pytest.approx(share, abs=1e-6)


def test_settings_that_nothing_acts_on_are_named(loom, quiet):
    config = loom.replace("model", residual="pre_norm").replace("model.loom", decay=0.25)
    config = config.replace("train", backprop="full")
    names = ["model.loom.decay=0.25", "train.backprop_loops=2"]
    assert [line.partition(":")[0] for line in without_effect(config)] == names
    config = config.replace("model", depth="token_choice").replace("model.mor", scale=0.1)
    config = config.replace("model.mor", capacity="1,1,.5,.5")
    names.insert(1, "model.mor.capacity=1,1,.5,.5")
    assert [line.partition(":")[0] for line in without_effect(config)] == names
    fixed = without_effect(config.replace("model", depth="fixed"))
    assert sum("model.mor.capacity" in line for line in fixed) == 1 and len(fixed) == 4
    said = "\n".join(describe(open_run(config, quiet)))
    assert all(name in said for name in names)
    assert without_effect(loom) == []


@pytest.mark.parametrize("plan", ["full", "segments", "last"])
def test_z_is_a_visits_mean_under_every_plan(loom, quiet, tmp_path, plan):
    trainer = open_run(loom.replace("train", backprop=plan), quiet)
    model, (inputs, _) = trainer.model, trainer.batch()
    before = range(2) if plan == "last" else range(0)  # loops without gradient add no z
    with torch.no_grad():
        sums = [
            model.run(x, range(4)).router_z - (model.run(x, before).router_z if before else 0)
            for x in inputs.split(2)
        ]
    wanted = torch.stack(sums).mean() / (4 - len(before))
    frozen = trainer.optimizer.step
    trainer.optimizer.step = lambda: None
    found = trainer.step(observe=True).figures()["z"]
    trainer.optimizer.step = frozen
    assert found == pytest.approx(wanted.item(), rel=1e-4)


def test_overlap_and_spread_of_known_loads():
    loads = torch.tensor([[[4, 0, 0, 0]], [[0, 4, 0, 0]], [[1, 1, 1, 1]], [[8, 0, 0, 0]]])
    matrix = router_overlap(loads)
    assert matrix[0, 1] == 0 and matrix[0, 3] == 1 and matrix[0, 2] == pytest.approx(0.5)
    found = load_spread(loads).tolist()
    assert found == pytest.approx([math.sqrt(3), math.sqrt(3), 0, math.sqrt(3)])


def test_a_nan_in_a_segment_stops_with_its_visit_named(loom, quiet, tmp_path):
    """The router of loop 3 is touched by the second segment alone."""
    trainer = open_run(loom, quiet)
    whole, before = trainer.step, []

    def poisoned(**options):
        if trainer.done == 12:
            experts(trainer).routers[2].data[:] = math.nan
            before.append(experts(trainer).bias.clone())
        return whole(**options)

    trainer.step = poisoned
    with pytest.raises(Diverged, match=r"loop 3, sublayer 2 \(MoE\).*step_000010"):
        trainer.fit()
    assert torch.equal(experts(trainer).bias, before[0])  # nor did loads move it on
    found = checkpoint.find(str(tmp_path / "run"))
    assert found.step == 10
    again = open_run(found.config.replace("train", out=str(tmp_path / "again")), quiet, found)
    assert all(torch.isfinite(x).all() for x in again.model.state_dict().values())
    assert again.fit()["step"] == 20


def test_a_nan_in_a_bias_stops_the_run(loom, quiet):
    trainer = open_run(loom, quiet)
    experts(trainer).bias[0] = math.nan
    with pytest.raises(Diverged):
        trainer.fit()


def test_resume_takes_the_new_decay_and_betas(loom, quiet, tmp_path):
    open_run(loom.replace("train", steps=2), quiet).fit()
    found = checkpoint.find(loom.train.out)
    changed = loom.replace("train", weight_decay=0.7, beta1=0.5, out=str(tmp_path / "on"))
    groups = open_run(changed, quiet, found).optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [0.7, 0.0]
    assert all(g["betas"] == (0.5, 0.95) for g in groups)


def test_held_out_loss_drops_no_token(loom, quiet):
    """Whatever the capacity: a drop would look at later tokens and other sequences."""
    losses = set()
    for factor in (0.0, 0.1):
        trainer = open_run(
            loom.replace("model.moe", capacity_factor=factor).replace(
                "train", out=f"{loom.train.out}-{factor}"
            ),
            quiet,
        )
        trainer.metrics = type("Nowhere", (), {"write": lambda self, **values: None})()
        trainer.live = ProgressBar(quiet, 1, 0)
        trainer.evaluate()
        losses.add(trainer.validated[1])
        assert trainer.model.training
    assert len(losses) == 1


def test_other_experts_than_the_checkpoints_are_refused_by_name(loom, quiet):
    open_run(loom.replace("train", steps=2), quiet).fit()
    found = checkpoint.find(loom.train.out)
    with pytest.raises(InputError, match=r"model\.moe\.top_k=1: the checkpoint .* with 2"):
        open_run(loom.replace("model.moe", top_k=1), quiet, found)
    with pytest.raises(InputError, match=r"train\.backprop=full: the checkpoint .* with segments"):
        open_run(loom.replace("train", backprop="full"), quiet, found)


def test_widths_that_experts_cannot_have_are_refused_before_anything_is_written(
    loom, quiet, tmp_path
):
    odd = loom.replace("model.moe", d_expert=12).replace("train", precision="bf16")
    with pytest.raises(InputError, match=r"d_expert=12: .*multiple of 8"):
        open_run(odd, quiet)
    assert not (tmp_path / "run").exists()
