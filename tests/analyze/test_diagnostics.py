"""Figures of one state, against the trainer's step, exact Jacobians and hand-made numbers."""

import copy
import math

import pytest
import torch

from deeploop.analyze.diagnose.diagnostics import (
    Batch,
    Measurement,
    mean_between_loops,
    measure_state,
    moments,
    probe_jacobian,
    update_size,
)
from deeploop.analyze.diagnose.per_loop import (
    gradients,
    gram,
    norm_of_sum,
    norms,
    per_loop_model,
    run_per_loop,
)
from deeploop.config import ModelConfig, MoEConfig
from deeploop.model.looplm import LoopLM
from deeploop.train.optim import make_optimizer
from deeploop.train.setup import open_run

EXPERTS = MoEConfig(experts=4, top_k=2, d_expert=16, shared=1)


@pytest.mark.parametrize("moe", [MoEConfig(), EXPERTS])
@pytest.mark.parametrize("after", [0, 10])
def test_the_step_is_the_trainers(config, quiet, moe, after):
    """On the trainer's batch the shared weights become what the trainer makes of them."""
    config = config.replace("model", moe=moe)
    config = config.replace("train", steps=after or 20, eval_every=0)
    trainer = open_run(config, quiet)
    if after:
        trainer.fit()
    # More steps than it has done, so that there is a next learning rate.
    trainer.config = config = trainer.config.replace("train", steps=20)
    model = LoopLM(config.model)
    model.load_state_dict(trainer.model.state_dict())
    optimizer = make_optimizer(model, config.train)
    optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    before = [p.detach().clone() for p in model.parameters()]
    start = model.embed_tokens.weight.detach().clone()
    measured = measure_state(model, optimizer, config, after, Batch(*trainer.batch(), 1, 0))
    trainer.step(observe=False)
    routers = {id(p) for s in model.sublayers for p in getattr(s.branch, "routers", ())}
    shared = {id(p) for s in model.sublayers for p in s.parameters()} - routers
    moved = 0.0
    for ours, theirs, old in zip(
        model.parameters(), trainer.model.parameters(), before, strict=True
    ):
        assert not torch.equal(theirs, old)
        wanted = theirs if id(ours) in shared else old
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)
        moved += (ours.detach() - old).double().square().sum().item()
    assert torch.equal(model.embed_tokens.weight, start)
    assert float(measured.steps.square().sum()) == pytest.approx(moved, rel=1e-5)


def test_probes_estimate_the_jacobian():
    """400 probes against all rows of it, to 10%, in units of the RMS of F."""
    torch.manual_seed(0)
    model = LoopLM(ModelConfig(d_model=8, n_heads=1, n_layers=1, loops=2, vocab_size=9))
    copies = per_loop_model(model.double())
    _, n = run_per_loop(model, copies.sublayers, torch.tensor([[3, 1, 4]]))
    rows = torch.eye(n.numel(), dtype=n.dtype).view(-1, *n.shape)
    exact = sum(
        torch.stack([gram(v) for v in gradients(n, copies.branches, weight=row)[0]]) for row in rows
    )
    estimate = sum(probe_jacobian(n, copies.branches, Batch(n, n, 400, 0))) / 400
    for of in (norms, norm_of_sum):
        torch.testing.assert_close(of(estimate), of(exact / n.numel()), rtol=0.1, atol=0)


def test_bounds_of_the_update():
    """Two groups of norms |U| = (1, 1; together 2) and (3, 4; together 5), moved by 1/2 and 2."""
    u = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[9.0, 0.0], [0.0, 16.0]]]).double()
    nothing = torch.zeros(())
    steps, moved = torch.tensor([0.5, 2.0]).double(), torch.tensor(1.1)
    m = Measurement(nothing, nothing, None, u, u[None], steps, [4, 25], moved)
    assert update_size(m, u, 0.1) == pytest.approx(
        {
            "lr": 0.1,
            "measured": 1.1,
            "bound": 2 * 0.5 + 5 * 2,
            "bound_untied": 2 * 0.5 + 7 * 2,
            "random": math.hypot(2 * 0.5 / 2, 5 * 2 / 5),
            "measured_over_bound": 0.1,
        }
    )


def test_moments_of_a_stream():
    h = torch.tensor([[[1.0, 3.0], [5.0, 3.0]]])
    rms, variance, between = moments(h).tolist()
    assert rms == pytest.approx(math.sqrt(44 / 4))
    assert variance == 1 and between == 2  # means of (1, 1), and of (4, 0)


def test_the_mean_cosine_leaves_the_diagonal_out():
    assert mean_between_loops(torch.tensor([[1.0, 0.5], [0.25, 1.0]])) == 0.375
