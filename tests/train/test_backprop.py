"""Plans of backprop: equal where they must be, cut where they say, whatever is recomputed."""

import pytest
import torch
import torch.nn.functional as F

from deeploop.config import Config, TrainConfig
from deeploop.config.backprop import Segment, segments
from deeploop.train.backprop import MicroBatch, run_segment
from tests.helpers.loom_cases import build, small

RESIDUALS = ["loom", "loom-released", "deeploop", "pre_norm"]


def make(residual="loom", loops=6, moe=None, **train):
    """A float64 model and a run of one micro-batch of 3 x 16 tokens."""
    released = {"global_source": "readout", "carry": "normalised"}
    model = build(
        small(
            loom=released if residual == "loom-released" else None,
            moe=moe,
            residual=residual.split("-")[0],
            loops=loops,
        )
    )
    train = TrainConfig(**{"batch_size": 3, "precision": "fp32"} | train)
    x, y = torch.randint(0, 31, (2, 3, 16), generator=torch.Generator().manual_seed(3))
    return model, Config(model=model.config, train=train), x, y


def run(model, config, x, y):
    """Gradients of all segments, added up, and their losses."""
    model.zero_grad()
    state, losses = None, []
    for segment in segments(config.train, config.model.loops):
        result = run_segment(model, config, segment, MicroBatch(x, y), state, None)
        state = result.state
        losses.append(result.loss)
    return losses, {n: p.grad for n, p in model.named_parameters()}


def assert_same_bits(a, b):
    for name, grad in a.items():
        assert (grad is None) == (b[name] is None), name
        assert grad is None or torch.equal(grad, b[name]), name


def test_plans():
    def spans(loops, **train):
        return [tuple(s.loops) for s in segments(TrainConfig(**train), loops)]

    assert spans(4) == [(0, 1, 2, 3)]
    assert spans(7, backprop="segments") == [(0, 1, 2), (3, 4, 5), (6,)]
    assert spans(6, backprop="segments") == [(0, 1, 2), (3, 4, 5)]
    assert spans(2, backprop="segments") == [(0, 1)]
    assert spans(3, backprop="segments", backprop_loops=1) == [(0,), (1,), (2,)]
    (last,) = segments(TrainConfig(backprop="last", backprop_loops=2), 5)
    assert last == Segment(range(3), range(3, 5))


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("plan", [("segments", 6), ("segments", 9), ("last", 6)])
def test_a_plan_of_all_loops_is_full_to_the_bit(residual, plan):
    name, loops = plan
    full_loss, full = run(*make(residual))
    loss, grads = run(*make(residual, backprop=name, backprop_loops=loops))
    assert torch.equal(loss[0], full_loss[0])
    assert_same_bits(grads, full)


def cross_entropy(model, n, y):
    return F.cross_entropy(model.logits(n).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("residual", RESIDUALS)
def test_segments_are_the_truncated_graph(residual):
    """One graph of all loops, cut by hand every two: the same losses and gradients."""
    model, config, x, y = make(residual, backprop="segments", backprop_loops=2)
    losses, grads = run(model, config, x, y)
    model.zero_grad()
    total, s = 0.0, None
    for first in (0, 2, 4):
        s = model.run(x, range(first, first + 2), None if s is None else model.rule.detach(s))
        total = total + cross_entropy(model, s.n, y) + 1e-3 * s.router_z
    total.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-6, atol=1e-12)
    whole = make(residual)
    full_loss, full = run(*whole)
    torch.testing.assert_close(losses[-1], full_loss[0], rtol=1e-12, atol=0)  # the forward is one
    # and the cut does cut: full backprop gives the first loops another gradient
    name = "sublayers.0.branch.qkv.weight"
    assert not torch.allclose(grads[name], full[name], rtol=1e-3)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_last_loops_alone_get_gradient(residual):
    model, config, x, y = make(residual, backprop="last", backprop_loops=2)
    losses, grads = run(model, config, x, y)
    model.zero_grad()
    with torch.no_grad():
        s = model.run(x, range(4))
    s = model.run(x, range(4, 6), model.rule.detach(s))
    (cross_entropy(model, s.n, y) + 1e-3 * s.router_z).backward()
    assert len(losses) == 1
    for name, p in model.named_parameters():
        if p.grad is None:
            assert grads[name] is None, name
        else:
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-6, atol=1e-12)


def test_every_segment_reaches_the_embedding_and_only_its_own_routers():
    model, config, x, y = make(backprop="segments", backprop_loops=2)
    state = None
    for segment in segments(config.train, 6):
        model.zero_grad()
        state = run_segment(model, config, segment, MicroBatch(x, y), state, None).state
        assert model.embed_tokens.weight.grad.norm() > 0
        for sublayer in model.sublayers[1::2]:
            reached = {i for i, r in enumerate(sublayer.branch.routers) if r.grad is not None}
            assert reached == set(segment.loops)
        assert not any(x.requires_grad for x in (state.h, state.memory.global_))


def test_later_segments_embed_with_the_weights_as_they_are_then():
    model, config, x, y = make(backprop="segments", backprop_loops=3)
    first, second = segments(config.train, 6)
    state = run_segment(model, config, first, MicroBatch(x, y), None, None).state
    before = run_segment(model, config, second, MicroBatch(x, y), state, None).loss
    with torch.no_grad():
        model.embed_tokens.weight.mul_(1.5)
    after = run_segment(model, config, second, MicroBatch(x, y), state, None).loss
    assert before != after


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("recompute", ["visit", "loop"])
@pytest.mark.parametrize("plan", ["full", "segments"])
def test_recomputing_gives_the_same_bits(residual, recompute, plan):
    moe = {"capacity_factor": 1.0}
    _, kept = run(*make(residual, moe=moe, backprop=plan))
    model, config, x, y = make(residual, moe=moe, backprop=plan, recompute=recompute)
    _, again = run(model, config, x, y)
    assert_same_bits(again, kept)


@pytest.mark.parametrize("recompute", ["visit", "loop"])
def test_recomputing_does_not_route_again(recompute):
    """A router that changed in between changes no choice: what was chosen is kept."""
    (model, _, x, y), (reference, *_) = make(loops=2), make(loops=2)
    chosen = []
    for m, mode in ((model, recompute), (reference, "none")):
        s = m.run(x, range(2), recompute=mode)
        loss = cross_entropy(m, s.n, y)
        for sublayer in m.sublayers[1::2]:
            sublayer.branch.bias.copy_(torch.linspace(5, -5, 4))  # would send all elsewhere
        loss.backward()
        chosen.append([p.grad for p in m.parameters()])
    for a, b in zip(*chosen, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("recompute", ["visit", "loop"])
def test_watch_sees_each_visit_once(recompute):
    model, config, x, y = make(loops=2, recompute=recompute)
    seen = []
    (segment,) = segments(config.train, 2)
    run_segment(model, config, segment, MicroBatch(x, y), None, lambda visit, h: seen.append(visit))
    assert [(v.loop, v.sublayer_index) for v in seen] == [
        (t, j) for t in range(2) for j in range(4)
    ]


def test_the_z_loss_is_in_the_loss():
    """Of each visit the mean over tokens of logsumexp^2; the loss that is logged is without."""
    model, config, x, y = make(loops=1, moe={"z_loss": 0.1})
    (loss,), with_z = run(model, config, x, y)
    bare = make(loops=1, moe={"z_loss": 0.0})
    (bare_loss,), without = run(*bare)
    assert torch.equal(loss, bare_loss)
    logits = []
    for sublayer in model.sublayers[1::2]:
        sublayer.branch.register_forward_pre_hook(
            lambda _, inputs: logits.append(F.linear(*inputs))
        )
    s = model.run(x, range(1))
    z = sum(each.logsumexp(-1).square().mean() for each in logits)
    torch.testing.assert_close(s.router_z, z, rtol=1e-6, atol=0)
    routers = [sublayer.branch.routers[0] for sublayer in model.sublayers[1::2]]
    terms = torch.autograd.grad(0.1 * s.router_z, routers)
    for i, term in zip((1, 3), terms, strict=True):
        name = f"sublayers.{i}.branch.routers.0"
        torch.testing.assert_close(with_z[name] - without[name], term, rtol=1e-6, atol=1e-12)
        assert term.norm() > 0


def test_micro_batches_add_up_to_the_batch():
    """Losses, z and gradients of parts of the batch; without a capacity, which is per part."""
    model, config, x, y = make(backprop="segments", backprop_loops=2, batch_size=3)
    whole_losses, whole = run(model, config, x, y)
    model.zero_grad()
    sums = [torch.zeros((), dtype=torch.float64) for _ in whole_losses]
    for rows in (slice(0, 1), slice(1, 3)):
        state = None
        for i, segment in enumerate(segments(config.train, 6)):
            result = run_segment(model, config, segment, MicroBatch(x[rows], y[rows]), state, None)
            state = result.state
            sums[i] += result.loss
    for a, b in zip(sums, whole_losses, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-6, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, whole[name], rtol=1e-6, atol=1e-10)
