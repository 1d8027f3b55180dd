"""ACT equals a definition written token by token, and halts every token with weights of sum 1."""

import dataclasses

import pytest
import torch

from deeploop.model.looplm import LoopLM
from tests.helpers.plain_model import (
    check_gradients,
    plain_loop,
    plain_readout,
    plain_signal,
    plain_start,
    scattered,
)
from tests.model.test_borders import config_of, tokens


def act_config(output="mean", **fields):
    m = config_of(**{"residual": "post_norm", "loop_signal": "add", "depth": "act"} | fields)
    return dataclasses.replace(m, act=dataclasses.replace(m.act, output=output, epsilon=0.1))


def plain_act(model, ids, loops=None):
    """Each token by itself, in Python numbers where no gradient is needed."""
    return plain_readout(model, halted(model, ids, loops)[0])


def halted(model, ids, loops=None):
    """The state that the head reads, the weights [loops, B, T] and the ponder times [B, T]."""
    c, (e, s) = model.config, plain_start(model, ids)
    B, T = ids.shape
    loops = c.loops if loops is None else loops
    total = {(b, t): 0.0 for b in range(B) for t in range(T)}
    weights = {place: [] for place in total}
    remainder, taken, y = {}, dict.fromkeys(total, 0), torch.zeros_like(s.h)
    for loop in range(loops):
        h = s.h + plain_signal(loop, c.d_model) if c.loop_signal == "add" else s.h
        p = torch.sigmoid(h @ model.depth.halt.weight[0] + model.depth.halt.bias)
        after, rows, outs = plain_loop(model, s, e, loop), [], []
        done = torch.tensor([place in remainder for place in total]).view(B, T, 1)
        for b in range(B):
            for t in range(T):
                place, w = (b, t), 0.0
                halts = place in remainder
                if not halts:
                    taken[place] += 1
                    last = loop + 1 == loops
                    reached = torch.as_tensor(total[place]).detach() + p[b, t].detach()
                    if last or reached > 1 - c.act.epsilon:
                        w = remainder[place] = 1 - total[place]
                    else:
                        w = p[b, t]
                        total[place] = total[place] + w  # a tensor, with its gradient
                weights[place].append(w)
                state = s.h[b, t] if halts else after.h[b, t]
                rows.append(state)
                keep = 1 - w if c.act.output == "interpolate" else 1
                outs.append(keep * y[b, t] + w * state)
        if s.memory is not None:  # of LOOM
            memory = [
                new.where(~done, old) for new, old in zip(after.memory, s.memory, strict=True)
            ]
            after = after._replace(memory=type(after.memory)(*memory))
        s = after._replace(h=torch.stack(rows).view_as(s.h))
        y = torch.stack(outs).view_as(y)
    ponder = [taken[place] + remainder[place] for place in total]
    return s._replace(h=y), weights, torch.stack([torch.as_tensor(x) for x in ponder]).view(B, T)


def model_of(bias=0.0, **fields):
    torch.manual_seed(0)
    model = scattered(LoopLM(act_config(**fields)))
    model.depth.halt.weight.data.mul_(3)
    model.depth.halt.bias.data.fill_(bias)
    return model


@pytest.mark.parametrize("bias", [-6.0, 0.0, 1.5])
@pytest.mark.parametrize("output", ["mean", "interpolate"])
def test_act_is_its_definition(output, bias):
    model = model_of(bias, output=output, loops=5)
    check_gradients(model, tokens(), plain_act, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("residual", ["pre_norm", "deeploop", "loom"])
def test_act_works_with_every_kind_of_rule(residual):
    fields = {"inject": "add"} if residual != "loom" else {}
    model = model_of(residual=residual, prelude=1, coda=1, **fields)
    check_gradients(model, tokens(), plain_act, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("bias", [-4.0, 0.0, 2.0])
def test_weights_of_each_token_sum_to_one_and_the_penalty_is_the_ponder_time(bias):
    model = model_of(bias, loops=4)
    ends = []
    model(tokens(), on_loop=ends.append)
    weights = torch.stack([s.depth.weight for s in ends])
    weights[-1] += 1 - ends[-1].depth.total
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]), rtol=0, atol=1e-12)
    assert (weights >= 0).all()
    _, plain, ponder = halted(model, tokens())
    rows = [[float(torch.as_tensor(w).detach()) for w in row] for row in plain.values()]
    wanted = torch.tensor(rows, dtype=torch.float64).T
    torch.testing.assert_close(weights.flatten(1), wanted, rtol=1e-9, atol=1e-12)
    penalty = model.depth.penalty(ends[-1])
    torch.testing.assert_close(penalty, 0.01 * ponder.double().mean(), rtol=1e-9, atol=0)
    (grad,) = torch.autograd.grad(penalty, model.depth.halt.bias)
    (plain_grad,) = torch.autograd.grad(ponder.double().mean() * 0.01, model.depth.halt.bias)
    torch.testing.assert_close(grad, plain_grad)


def test_a_halted_token_keeps_its_state():
    model = model_of(bias=20.0, loops=4)  # every token halts in its first loop
    ends = []
    out = model(tokens(), on_loop=ends.append)
    assert torch.equal(ends[0].h, ends[-1].h)
    torch.testing.assert_close(out, model(tokens(), loops=1))
    assert model.depth.figures(ends[-1])["act_loops"] == 1


def test_a_token_that_never_halts_reads_its_last_state_alone():
    model = model_of(bias=-30.0, loops=4)
    plain = scattered(LoopLM(config_of("post_norm", loop_signal="add", loops=4)))
    plain.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=1e-5, atol=1e-8)


def test_cache_on_equals_cache_off():
    model = model_of(loops=4)
    cache = model.new_cache(batch=2, max_len=8)
    pieces = [model(x, cache=cache) for x in tokens().split([3, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens()), rtol=1e-9, atol=1e-9)


def test_the_halting_bias_is_set_after_every_other_initialisation():
    depth = LoopLM(act_config()).depth
    assert not depth.halt.weight.any() and depth.halt.bias == 1.0
