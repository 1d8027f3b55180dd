"""Fixed points: one-step and phantom gradients, no leak from later tokens, ends token by token."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from deeploop.analyze.plan.memory import step_memory
from deeploop.config import Config, MoEConfig, SolverConfig, TrainConfig
from deeploop.config.backprop import segments
from deeploop.model.depth.solvers import anderson, relative_residual
from deeploop.model.looplm import LoopLM
from deeploop.train.backprop import MicroBatch, run_segment
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.helpers.plain_model import plain_loop, plain_readout, plain_start, scattered
from tests.model.test_borders import config_of, tokens

INJECTIONS = {
    "add": {"residual": "post_norm", "inject": "add", "start": "noise"},
    "adapter": {"residual": "deeploop", "inject": "adapter", "loop_norm": "last", "coda": 1},
    "contractive": {"inject": "contractive", "prelude": 1, "loop_norm": "each"},
}  # fmt: skip
BATCH = 2


def solving(solver=None, **fields):
    """A configuration of the rule, on the injection of Parcae unless others are given."""
    fields = {"inject": "contractive", "depth": "fixed_point", "loops": 6, "seq_len": 8} | fields
    return dataclasses.replace(config_of(**fields), solver=SolverConfig(**solver or {}))


def model_of(solver=None, contracts=False, **fields):
    """A float64 model; `contracts`: branches so small that a loop is a contraction."""
    torch.manual_seed(0)
    model = scattered(LoopLM(solving(solver, **fields)))
    if contracts:
        for sublayer in model.sublayers:
            sublayer.branch.out.weight.data.mul_(0.1)
    return model


def run_of(model, last):
    train = TrainConfig(
        batch_size=BATCH, precision="fp32", backprop="last" if last else "full",
        backprop_loops=last or 1,
    )  # fmt: skip
    return Config(model=model.config, train=train)


def plain_step(model, x, y, last):
    """One step's mean loss with its gradients, from definitions; the residual and the state."""
    c = model.config
    e, s = plain_start(model, x)
    with torch.no_grad():
        budget = c.loops - (last or c.loops)
        if c.solver.method == "anderson":
            found = anderson(
                lambda h: plain_loop(model, s._replace(h=h), e, 0).h, s.h, budget, 0.0, 3
            )
            s = s._replace(h=found.state)
        else:
            for _ in range(budget):
                s = plain_loop(model, s, e, 0)
    for _ in range(last or c.loops):
        after = plain_loop(model, s, e, 0)
        residual = (after.h - s.h).norm(dim=-1) / (1e-5 + after.h.norm(dim=-1))
        s = s._replace(h=c.solver.damping * after.h + (1 - c.solver.damping) * s.h)
    logits = plain_readout(model, s) @ model.head.T
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    return loss.detach(), residual.detach()


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize(
    ("last", "damping"), [(1, 1.0), (3, 0.6), (0, 0.5)], ids=["one step", "phantom", "unrolled"]
)
@pytest.mark.parametrize("method", ["plain", "anderson"])
def test_a_steps_gradients_are_their_definition(injection, last, damping, method):
    solver = {"method": method, "tolerance": 0.0, "damping": damping, "memory": 3}
    model = model_of(solver, **INJECTIONS[injection])
    x, y, config = tokens(), tokens().roll(3, 1), run_of(model, last)
    (segment,) = segments(config.train, config.model.loops)
    result = run_segment(model, config, segment, MicroBatch(x, y))
    ours = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    loss, residual = plain_step(model, x, y, last)
    torch.testing.assert_close(result.loss, loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        result.figures["fixed_point_residual"], residual.mean(), rtol=1e-7, atol=1e-9
    )
    if last:
        assert result.figures["solver_loops"] == config.model.loops - last
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_plain_without_tolerance_and_damping_is_the_rule_fixed_to_the_bit(injection):
    """A training step with last(k), and a forward without gradient."""
    outs = []
    for depth in ("fixed", "fixed_point"):
        torch.manual_seed(0)
        model = LoopLM(solving({"tolerance": 0.0}, **INJECTIONS[injection] | {"depth": depth}))
        config = run_of(model, 2)
        (segment,) = segments(config.train, config.model.loops)
        run_segment(model, config, segment, MicroBatch(tokens(), tokens().roll(3, 1)))
        with torch.no_grad():
            outs.append([model(tokens()), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("method", ["plain", "anderson"])
@torch.no_grad()
def test_no_token_depends_on_a_later_one(method):
    """Each token has its own weights and its own end, in the same evaluations."""
    model = model_of({"method": method, "tolerance": 1e-2}, contracts=True, loops=20)
    x, ends = tokens(), []
    out = model(x, on_loop=ends.append)
    evaluations = ends[-1].depth.evaluations
    assert len(evaluations.unique()) > 2 and evaluations.max() < 20
    for length in (1, 3, 7):
        torch.testing.assert_close(model(x[:, :length]), out[:, :length], rtol=1e-9, atol=1e-9)
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 31
    again = model(changed)
    torch.testing.assert_close(again[:, :5], out[:, :5], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(again[:, 5:], out[:, 5:])


@pytest.mark.parametrize("method", ["plain", "anderson"])
@torch.no_grad()
def test_no_sequence_depends_on_the_others_of_its_batch(method):
    model = model_of({"method": method, "tolerance": 1e-2}, contracts=True, loops=20)
    rows = [model(row) for row in tokens(3).split(1)]
    torch.testing.assert_close(torch.cat(rows), model(tokens(3)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["plain", "anderson"])
@pytest.mark.parametrize("tolerance", [0.0, 1e-3, 1e-1])
@torch.no_grad()
def test_cache_on_equals_cache_off(method, tolerance):
    """A token at rest gives its keys and values in every loop, also once all are at rest."""
    solver = {"method": method, "tolerance": tolerance}
    model = model_of(solver, contracts=True, loops=12, prelude=1, coda=1)
    cache, visits = model.new_cache(batch=2, max_len=8), []
    pieces = [model(x, cache=cache) for x in tokens().split([3, 1, 4], dim=1)]
    whole = model(tokens(), on_visit=lambda visit, h: visits.append(visit.loop))
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-9)
    loops = 1 + max(v for v in visits if v is not None)
    assert loops < 12 if tolerance == 1e-1 else tolerance or loops == 12


@pytest.mark.parametrize("method", ["plain", "anderson"])
@torch.no_grad()
def test_loops_are_a_budget_and_the_state_after_each_is_that_of_a_smaller_one(method):
    model = model_of({"method": method, "tolerance": 1e-2}, contracts=True)
    ends = []
    model(tokens(), loops=20, on_loop=ends.append)
    assert len(ends) == 20  # also those after the last evaluation
    for loops in (1, 3, 20):
        n = model.output(ends[loops - 1]._replace(n=None), tokens())
        torch.testing.assert_close(n, model(tokens(), loops=loops))
    residuals = torch.stack([s.depth.residual.mean() for s in ends])
    assert residuals[0] > residuals[-1] and residuals[-1] < 1e-2
    assert torch.equal(ends[-1].h, ends[-2].h)


@torch.no_grad()
def test_starts_lead_to_one_fixed_point_of_a_contraction():
    model = model_of({"tolerance": 1e-9}, contracts=True)
    s = model.run(tokens(), range(99))
    other = s._replace(h=torch.randn_like(s.h), n=None, depth=None)
    t = model.run(tokens(), range(99), other)
    assert t.depth.evaluations.max() < 99 and t.depth.residual.max() < 1e-9
    torch.testing.assert_close(s.h, t.h, rtol=1e-6, atol=1e-7)


def test_a_run_logs_the_residual_and_the_solvers_loops(config, quiet):
    run = config.replace("model", inject="contractive", depth="fixed_point", loops=4)
    run = run.replace("train", steps=2, log_every=1, backprop="last", backprop_loops=1)
    open_run(run, quiet).fit()
    with open(f"{run.train.out}/metrics.jsonl") as file:
        lines = [line for line in map(json.loads, file) if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert 0 < line["fixed_point_residual"] < 2 and 0 < line["solver_loops"] <= 3


def test_bfloat16_branches_leave_the_solver_in_float32():
    model = LoopLM(solving({"method": "anderson"}))
    ends = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens(), on_loop=ends.append)
    assert ends[-1].h.dtype == ends[-1].depth.residual.dtype == torch.float32
    assert ends[-1].h.isfinite().all()


@pytest.mark.parametrize("method", ["plain", "anderson"])
def test_a_plan_counts_the_whole_budget(method):
    """No residual is known before a run; anderson keeps 2 m states beside the loop's."""
    model = solving({"method": method})
    config = Config(model=model, train=TrainConfig(batch_size=BATCH, backprop="last",
                                                   backprop_loops=1, precision="fp32"))  # fmt: skip
    assert step_memory(config).at(BATCH).peak > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inject": "none"}, r"model\.depth=fixed_point: needs model\.inject"),
        ({"inject": "convex"}, r"do not depend on their number.*model\.inject=convex"),
        ({"inject": "add"}, r"do not depend on their number.*model\.start=embedding"),
        ({"loop_signal": "add"}, r"model\.loop_signal=add"),
        ({"residual": "loom", "inject": "none"}, r"model\.residual=loom"),
        ({"moe": MoEConfig(experts=4, top_k=2)}, r"model\.moe\.router_per_loop=True"),
    ],
)
def test_loops_that_differ_are_refused_when_the_model_is_made(fields, words):
    with pytest.raises(InputError, match=words):
        LoopLM(solving(**fields))


def test_experts_with_one_router_for_all_loops_solve(config, quiet):
    moe = MoEConfig(experts=4, top_k=2, d_expert=8, router_per_loop=False)
    run = config.replace("model", inject="contractive", depth="fixed_point", loops=5, moe=moe)
    run = run.replace("model.solver", tolerance=0.5)
    run = run.replace("train", backprop="last", backprop_loops=2, micro_batch=2)
    trainer = open_run(run, quiet)
    figures = trainer.step(observe=True).figures()
    assert figures["solver_loops"] < 3 and len(figures["load_spread"]) == 5
    trainer.lock.close()


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"backprop": "segments"}, r"model\.depth=fixed_point: needs train\.backprop=full or last"),
        (
            {"loop_count": "poisson", "loop_count_per": "sequence"},
            r"train\.loop_count_per=sequence: model\.depth=fixed_point ends each token",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(train, words):
    with pytest.raises(InputError, match=words):
        Config(model=solving()).replace("train", **train)


@pytest.mark.parametrize(
    "fields", [{"damping": 0.0}, {"damping": 1.1}, {"tolerance": -1.0}, {"memory": 0}]
)
def test_impossible_solvers_are_refused(fields):
    (name,) = fields
    with pytest.raises(InputError, match=rf"model\.solver\.{name}="):
        SolverConfig(**fields)


def test_a_configuration_from_before_has_no_solver():
    values = json.loads(Config().to_json())
    del values["model"]["solver"]
    assert Config.from_json(json.dumps(values)) == Config()


def test_a_residual_is_relative_and_has_no_gradient():
    x, y = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    residual = relative_residual(x, y)
    assert not residual.requires_grad
    torch.testing.assert_close(residual, torch.full((2,), 3**0.5 / (1e-5 + 3**0.5)))
