"""Token choice equals a definition written token by token; it is causal as it trains."""

import pytest
import torch

from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.helpers.plain_model import check_gradients, plain_forward, plain_start
from tests.helpers.plain_mor import (
    gradients,
    mor_model,
    plain_like,
    plain_mor,
    reach,
    run_of,
    with_scale,
)
from tests.model.test_borders import config_of, tokens

EXPERTS = {"experts": 4, "top_k": 2, "d_expert": 8, "shared": 1, "capacity_factor": 0.0}
MODELS = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid", "scale": 0.5},
    "Huginn": {"model": {"start": "noise", "inject": "adapter", "prelude": 1, "coda": 1}},
    "released": {"output": "released", "model": {"loop_norm": "each"}},
    "loom, experts": {"model": {"residual": "loom"}, "moe": EXPERTS},
    "first keys": {"kv": "first", "model": {"prelude": 1, "coda": 1}},
}


def model_of(**fields):
    model = mor_model("token_choice", **fields)
    model.depth.router.data.mul_(0.3)  # scores that are not all near 1
    return model


def plain_scores(model, h):
    """The score of each number of loops: stream h [d_model] -> [R]."""
    logits = model.depth.router @ h
    if model.config.mor.score == "sigmoid":
        return 1 / (1 + (-logits).exp())
    return logits.exp() / logits.exp().sum()


def plain(model, ids, loops=None):
    given = {}

    def take_part(b, h, loop, before):
        if loop == 0:
            scores = [plain_scores(model, row) for row in h]
            best = [max(range(len(p)), key=lambda i, p=p: p[i].item()) for p in scores]
            given[b] = [(i + 1, p[i]) for i, p in zip(best, scores, strict=True)]
        mine = given[b]
        return {t: model.config.mor.scale * mine[t][1] for t in before if mine[t][0] > loop}

    return plain_mor(model, ids, take_part, loops)


@pytest.mark.parametrize("case", MODELS)
def test_token_choice_is_its_definition(case):
    model = model_of(**MODELS[case])
    check_gradients(model, tokens(), plain, rtol=1e-8, atol=1e-10)
    for loops in (1, 2, 5):
        wanted = plain(model, tokens(), loops)
        torch.testing.assert_close(model(tokens(), loops=loops), wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(model.eval()(tokens()), plain(model, tokens()))


def ends_of(model, ids=None):
    ends = []
    model(tokens() if ids is None else ids, on_loop=ends.append)
    return ends


def test_a_token_takes_the_loops_it_was_given_and_no_more():
    ends = ends_of(model_of())
    loops = ends[-1].depth.loops
    assert loops.unique().tolist() == [1, 2, 3]
    for loop in (1, 2):
        same = (ends[loop].h == ends[loop - 1].h).all(-1)
        assert torch.equal(same, loops <= loop)
    depth = model_of().depth
    shares = torch.stack([(loops > loop).float().mean() for loop in range(3)])
    assert torch.equal(depth.figures(ends[-1])["loop_shares"], shares)
    assert torch.equal(depth.loops_taken(ends[-1]), loops)
    assert torch.equal(depth.loops_taken(ends[1]), loops.clamp(max=2))  # two have been run


@pytest.mark.parametrize("case", ["softmax", "Huginn", "loom, experts"])
def test_all_loops_of_weight_one_are_the_plain_loop(case):
    model = model_of(**MODELS[case], score="sigmoid")
    model.depth.router.data.zero_()  # scores of 1/2, weights of 1
    model.depth.assign = lambda h, assign=model.depth.assign: assign(h)._replace(
        loops=torch.full(h.shape[:2], 3)
    )
    with_scale(model, 2.0)
    fixed = plain_like(model)
    torch.testing.assert_close(model(tokens()), fixed(tokens()), rtol=1e-12, atol=1e-12)
    wanted = plain_forward(fixed, tokens())
    torch.testing.assert_close(model(tokens()), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", ["softmax", "Huginn", "loom, experts", "first keys"])
def test_no_token_sees_later_ones_in_training_either(case):
    model = model_of(**MODELS[case])
    assert not reach(model).tril(-1).any() and reach(model).diagonal().all()


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("case", ["softmax", "Huginn", "loom, experts", "first keys"])
def test_cache_on_equals_cache_off(case, batch):
    model, ids = model_of(**MODELS[case]).eval(), tokens(batch)
    whole = model(ids)
    for pieces in ([3, 1, 4], [1] * 8):
        cache = model.new_cache(batch=batch, max_len=8)
        n = torch.cat([model(x, cache=cache) for x in ids.split(pieces, dim=1)], 1)
        torch.testing.assert_close(n, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_penalty_balances_each_sequence(score):
    model = model_of(score=score, balance=0.3, z_loss=0.2)
    ends = ends_of(model)
    _, start = plain_start(model, tokens())
    balance, z, counts = [], [], []
    for h, loops in zip(start.h, ends[-1].depth.loops, strict=True):
        p = torch.stack([plain_scores(model, row) for row in h])
        p = p / p.sum(1, keepdim=True)
        share = torch.stack([(loops == i + 1).double().mean() for i in range(3)])
        balance.append(3 * sum(share[i] * p[:, i].mean() for i in range(3)))
        z += [(model.depth.router @ row).exp().sum().log() ** 2 for row in h]
        counts.append(share)
    assert not torch.equal(*counts)
    wanted = 0.3 * sum(balance) / 2 + 0.2 * sum(z) / len(z)
    penalty = model.depth.penalty(ends[-1])
    torch.testing.assert_close(penalty, wanted, rtol=1e-9, atol=0)
    grads = (
        torch.autograd.grad(x, model.depth.router, retain_graph=True) for x in (penalty, wanted)
    )
    torch.testing.assert_close(*grads)


def test_even_shares_and_scores_have_a_balance_of_one():
    model = model_of()
    model.depth.router.data.copy_(torch.eye(3, 16))
    h = torch.zeros(1, 3, 16, dtype=torch.float64)
    h[0, :, :3] = torch.eye(3)
    torch.testing.assert_close(model.depth.assign(h).balance.item(), 1.0)


@pytest.mark.parametrize("case", ["Huginn", "loom, experts", "first keys"])
def test_recomputed_gradients_are_the_same_to_the_bit(case):
    model = model_of(**MODELS[case])
    wanted = gradients(model, run_of(model))
    assert wanted["depth.router"].any()
    for recompute in ("visit", "loop"):
        made = gradients(model, run_of(model, recompute=recompute))
        assert all(torch.equal(made[name], wanted[name]) for name in wanted)


def test_two_sizes_of_micro_batch_give_the_same_gradients():
    model = model_of()
    wanted, made = gradients(model, run_of(model)), gradients(model, run_of(model), micro=1)
    for name, grad in wanted.items():
        torch.testing.assert_close(made[name], grad, rtol=1e-9, atol=1e-12)


def test_a_resumed_run_is_the_unbroken_one(config, quiet):
    run = config.replace("model", depth="token_choice").replace(
        "train", steps=3, save_every=2, eval_every=0, eval_tokens=64, log_every=1
    )
    unbroken = open_run(run, quiet)
    unbroken.fit()
    shares = unbroken.metrics.read()[0]["loop_shares"]
    assert shares[0] == 1 and 0 < shares[1] < 1
    path = f"{run.train.out}/checkpoints/step_000002"
    resumed = open_run(run.replace("train", out=f"{run.train.out}-2"), quiet, checkpoint.find(path))
    resumed.fit()
    for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_plans_that_leave_the_router_untrained_are_refused(config):
    run = config.replace("model", depth="token_choice")
    for plan in ("last", "segments"):
        with pytest.raises(InputError, match=r"token_choice: needs train\.backprop=full or prog"):
            run.replace("train", backprop=plan, backprop_loops=1)


def test_the_router_has_a_row_for_each_number_of_loops():
    assert LoopLM(config_of(depth="token_choice")).depth.router.shape == (3, 16)
