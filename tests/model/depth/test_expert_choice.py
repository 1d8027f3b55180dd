"""Expert choice equals a definition written token by token; outside of training it is causal."""

import pytest
import torch
import torch.nn.functional as F

from deeploop.model.attention import AttentionContext
from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.helpers.data import refused
from tests.helpers.plain_model import check_gradients, plain_forward
from tests.helpers.plain_mor import (
    gradients,
    mor_config,
    mor_model,
    plain_like,
    plain_mor,
    reach,
    run_of,
    with_scale,
)
from tests.model.test_borders import config_of, tokens

CAPACITY = "1,.75,.4"  # of 8 tokens 8, 6 and 3
EXPERTS = {"experts": 4, "top_k": 2, "d_expert": 8, "shared": 1, "capacity_factor": 0.0}
MODELS = {
    "pre_norm": {},
    "input, norm": {"model": {"inject": "add", "loop_norm": "each", "coda": 1}},
    "Huginn": {"model": {"start": "noise", "inject": "adapter", "prelude": 1, "coda": 1}},
    "signal": {"model": {"residual": "deeploop", "loop_signal": "add", "prelude": 1}},
    "loom": {"model": {"residual": "loom"}},
    "experts": {"moe": EXPERTS},
    "loom, experts": {"model": {"residual": "loom"}, "moe": EXPERTS},
    "released": {"output": "released", "scale": 0.1},
    "first loop, too": {"capacity": ".75,.5,.5"},
    "first keys": {"kv": "first", "model": {"qk_norm": True, "prelude": 1, "coda": 1}},
    "loom, first keys": {"kv": "first", "model": {"residual": "loom"}},
}


def model_of(**fields):
    return mor_model("expert_choice", **{"capacity": CAPACITY} | fields)


def take_part(model):
    """The rule for one sequence, with Python's sort."""
    depth, mor = model.depth, model.config.mor
    shares = [float(x) for x in mor.capacity.split(",")]

    def rule(b, h, loop, before):
        router = depth.routers[min(loop, len(shares) - 1)][0]
        share, last = shares[min(loop, 2)], 1.0 if loop == 0 else shares[min(loop - 1, 2)]
        logit = {t: h[t] @ router for t in before}
        if model.training:
            kept = sorted(before, key=lambda t: -float(logit[t].detach()))
            kept = sorted(kept[: max(1, int(share * len(h)))])
        else:
            kept = [t for t in before if share == last or logit[t] > 0]
        return {t: mor.scale * torch.sigmoid(logit[t]) for t in kept}

    return rule


def plain(model, ids, loops=None):
    return plain_mor(model, ids, take_part(model), loops)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("case", MODELS)
def test_expert_choice_is_its_definition(case, training):
    model = model_of(**MODELS[case]).train(training)
    ids = tokens() if training else tokens(batch=4, length=16)  # so that every loop has some
    check_gradients(model, ids, plain, rtol=1e-8, atol=1e-10)
    for loops in (1, 5):
        wanted = plain(model, tokens(), loops)
        torch.testing.assert_close(model(tokens(), loops=loops), wanted, rtol=1e-8, atol=1e-10)


def test_each_loop_takes_its_share_of_the_tokens_of_the_loop_before():
    model, ends = model_of(), []
    model(tokens(), on_loop=ends.append)
    took = [model.depth.loops_taken(s) > loop for loop, s in enumerate(ends)]
    assert [x.sum(1).tolist() for x in took] == [[8, 8], [6, 6], [3, 3]]
    assert (took[2] <= took[1]).all() and not torch.equal(took[1][0], took[1][1])
    shares = model.depth.figures(ends[-1])["loop_shares"]
    torch.testing.assert_close(shares, torch.tensor([1, 0.75, 0.375]))
    streams = [s.h for s in ends]
    for loop in (1, 2):
        same = (streams[loop] == streams[loop - 1]).all(-1)
        assert torch.equal(same, ~took[loop])


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("case", ["pre_norm", "Huginn", "loom", "loom, experts"])
def test_capacity_one_and_weight_one_are_the_plain_loop(case, training):
    fields = MODELS[case]
    model = model_of(**fields | {"capacity": "1,1,1"}).train(training)
    for router in model.depth.routers:
        router.data.zero_()
    with_scale(model, 2.0)  # a weight of 2 sigmoid(0) = 1
    fixed = plain_like(model)
    torch.testing.assert_close(model(tokens()), fixed(tokens()), rtol=1e-12, atol=1e-12)
    wanted = plain_forward(fixed, tokens())
    torch.testing.assert_close(model(tokens()), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("causal", ["loss", "router"])
@pytest.mark.parametrize("case", ["pre_norm", "Huginn", "loom, experts", "first keys"])
def test_outside_of_training_no_token_sees_later_ones(case, causal):
    model = model_of(**MODELS[case], causal=causal).eval()
    assert not reach(model).tril(-1).any() and reach(model).diagonal().all()


def test_the_choice_of_training_sees_later_tokens():
    """The leak that eval mode closes, and for which training's own loss must not be reported."""
    assert reach(model_of()).tril(-1).any()


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize(
    "case", ["pre_norm", "Huginn", "loom, experts", "first loop, too", "first keys"]
)
def test_cache_on_equals_cache_off(case, batch):
    model, ids = model_of(**MODELS[case]).eval(), tokens(batch)
    ends = []
    whole = model(ids, on_loop=ends.append)
    loops = ends[-1].depth.loops
    assert loops.unique().numel() > 1  # some tokens stop earlier
    for pieces in ([3, 1, 4], [1] * 8):
        cache = model.new_cache(batch=batch, max_len=8)
        n = torch.cat([model(x, cache=cache) for x in ids.split(pieces, dim=1)], 1)
        torch.testing.assert_close(n, whole, rtol=1e-9, atol=1e-9)
    for b in range(batch):  # nor does a sequence depend on the others
        alone = model(ids[b : b + 1])
        torch.testing.assert_close(alone, whole[b : b + 1], rtol=1e-9, atol=1e-9)


def test_a_cache_in_training_is_refused():
    model = model_of()
    refused(lambda: model(tokens(), cache=model.new_cache(2, 8)), "call model.eval()")


@pytest.mark.parametrize("causal", ["loss", "router"])
def test_the_penalty_is_the_cross_entropy_of_telling_the_choice(causal):
    model, ends = model_of(causal=causal, causal_weight=0.5), []
    model(tokens(), on_loop=ends.append)
    routers = model.depth.routers if causal == "loss" else model.depth.causal_routers
    fits, told = [], []
    for loop in (1, 2):  # the first takes all
        before, took = ends[loop - 1], ends[loop].depth.loops > loop
        logit = before.h @ routers[loop][0]
        may = before.depth.loops == loop
        fits.append(F.binary_cross_entropy(logit.sigmoid()[may], took[may].double()))
        told.append(((logit > 0) == took)[may].double().mean())
    penalty = model.depth.penalty(ends[-1])
    torch.testing.assert_close(penalty, 0.5 * sum(fits), rtol=1e-9, atol=0)
    figure = model.depth.figures(ends[-1])["choice_told"]
    torch.testing.assert_close(figure, sum(told) / 2, check_dtype=False)
    assert 0 < figure < 1
    grads = torch.autograd.grad(penalty, [model.embed_tokens.weight, routers[1]], allow_unused=True)
    assert (grads[0] is None) == (causal == "router") and grads[1].any()


def test_without_weight_or_choice_there_is_no_penalty():
    for fields in ({"causal_weight": 0.0}, {"capacity": "1,1,1"}):
        model, ends = model_of(**fields), []
        model(tokens(), on_loop=ends.append)
        assert model.depth.penalty(ends[-1]) is None


# Training.


@pytest.mark.parametrize("case", ["Huginn", "loom, experts", "loom, first keys"])
def test_recomputed_gradients_are_the_same_to_the_bit(case):
    model = model_of(**MODELS[case])
    wanted = gradients(model, run_of(model))
    for recompute in ("visit", "loop"):
        made = gradients(model, run_of(model, recompute=recompute))
        assert all(torch.equal(made[name], wanted[name]) for name in wanted)


def test_a_segment_of_all_loops_is_full_and_each_segment_trains_its_routers():
    model = model_of(model={"residual": "loom"})
    full = gradients(model, run_of(model))
    one = gradients(model, run_of(model, backprop="segments", backprop_loops=3))
    assert all(torch.equal(one[name], full[name]) for name in full)
    cut = gradients(model, run_of(model, backprop="segments", backprop_loops=1))
    assert all(cut[f"depth.routers.{loop}"].any() for loop in range(3))


def test_two_sizes_of_micro_batch_give_the_same_gradients():
    model = model_of(causal_weight=0.5)
    wanted, made = gradients(model, run_of(model)), gradients(model, run_of(model), micro=1)
    for name, grad in wanted.items():
        torch.testing.assert_close(made[name], grad, rtol=1e-9, atol=1e-12)


def test_a_resumed_run_is_the_unbroken_one(config, quiet):
    run = config.replace("model", depth="expert_choice").replace(
        "train", steps=3, save_every=2, eval_every=0, eval_tokens=64, log_every=1
    )
    unbroken = open_run(run, quiet)
    unbroken.fit()
    lines = unbroken.metrics.read()
    assert lines[0]["loop_shares"] == [1.0, 0.5] and 0 <= lines[0]["choice_told"] <= 1
    path = f"{run.train.out}/checkpoints/step_000002"
    resumed = open_run(run.replace("train", out=f"{run.train.out}-2"), quiet, checkpoint.find(path))
    resumed.fit()
    for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_first_loops_keys_are_all_that_is_cached():
    model = model_of(**MODELS["first keys"])
    assert model.new_cache(1, 8).slots == 2 + 1 + 1 and model_of().new_cache(1, 8).slots == 6


def test_queries_over_first_keys_are_those_of_attention_with_its_loops_adapter():
    model = model_of(model={"lora_rank": 2})
    attention = model.sublayers[0]
    adapters = attention.adapters_in(1)
    adapters[0].b.data.normal_()
    n, kept = torch.randn(2, 8, 16, dtype=torch.float64), []
    context = AttentionContext(*model.rope(tokens(), None, n.dtype), 1)
    f = attention.branch(n, context._replace(kept=kept), adapters)
    read = attention.branch(n, context._replace(first=kept[0]), adapters)
    torch.testing.assert_close(read, f, rtol=1e-12, atol=1e-12)


def test_segments_after_the_first_read_its_keys_without_gradient():
    model = model_of(**MODELS["loom, first keys"])
    gradients(model, run_of(model, backprop="segments", backprop_loops=1))
    assert model.detach(model.run(tokens(), range(2))).kv[1][0].grad_fn is None


# Configuration.


@pytest.mark.parametrize(
    ("capacity", "says"),
    [
        ("1,.5", "has 2 shares, and needs one for each of model.loops=3"),
        ("1,.5,.75", "none is larger than the one before"),
        ("1.5,1,1", "up to 1"),
        ("1,.5,0", "above 0"),
        ("1,nan,.5", "above 0"),
        ("1,half,.5", "must be linear"),
        ("", "must be linear"),
    ],
)
def test_capacities_that_cannot_be_are_refused(capacity, says):
    refused(lambda: mor_config("expert_choice", capacity=capacity), "model.mor.capacity", says)


def test_capacities_of_another_number_of_loops_matter_where_they_are_read_alone():
    mor_config("fixed", capacity="1,.5")


def test_linear_capacities_fall_from_all_to_one_in_r():
    model = model_of(capacity="linear")
    assert model.depth.capacities == (1, 2 / 3, 1 / 3)
    ends = []
    model(tokens(length=9), on_loop=ends.append)
    loops = ends[-1].depth.loops
    assert [int((loops[0] > loop).sum()) for loop in range(3)] == [9, 6, 3]


def test_plans_and_draws_that_do_not_go_with_routers_are_refused(config):
    run = config.replace("model", depth="expert_choice")
    with pytest.raises(InputError, match=r"expert_choice: needs train\.backprop=full or seg"):
        run.replace("train", backprop="last", backprop_loops=1)
    drawn = {"loop_count": "poisson", "loop_count_per": "sequence"}
    refused(lambda: run.replace("train", **drawn), "model.depth=expert_choice")


def test_routers_start_apart():
    depth = LoopLM(config_of(depth="expert_choice")).depth
    assert not torch.equal(depth.routers[0], depth.routers[1])
    assert torch.cat(list(depth.routers)).std().item() == pytest.approx(0.25, rel=0.4)
