"""Exit gates: the distribution over loops, and where it is read."""

import torch

from deeploop.model.depth.gate import log_exit_distribution
from deeploop.model.looplm import LoopLM
from deeploop.train.losses.base import LoopEnds
from tests.helpers.plain_model import plain_loop, plain_readout, plain_start, scattered
from tests.model.test_borders import config_of, tokens


def test_the_exit_distribution_is_its_definition_and_sums_to_one():
    logits = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p, stay = [], torch.ones(3, 4, dtype=torch.float64)
    for t in range(4):
        p.append(stay * logits[t].sigmoid())
        stay = stay * (1 - logits[t].sigmoid())
    wanted = torch.stack([*p, stay])
    made = log_exit_distribution(logits).exp()
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(made.sum(0), torch.ones(3, 4, dtype=torch.float64))


def test_extreme_logits_keep_the_distribution_and_its_gradient_finite():
    logits = torch.tensor([[900.0], [-900.0], [0.0]], requires_grad=True)
    p = log_exit_distribution(logits)
    (p.exp() * p).sum().backward()
    assert p.exp().sum() == 1 and logits.grad.isfinite().all()


def test_one_loop_takes_all():
    assert log_exit_distribution(torch.randn(1, 2, 3)).exp().eq(1).all()


def test_gates_read_the_normed_state_after_each_loop():
    """Ouro: the normed state is the next loop's input, the head's and the gate's."""
    for fields in ({"residual": "peri_norm", "loop_norm": "each"}, {"coda": 1}):
        torch.manual_seed(0)
        model = scattered(LoopLM(config_of(depth="gate", **fields)))
        ends = LoopEnds(model, tokens())
        model.run(tokens(), range(3), on_loop=ends.add)
        e, s = plain_start(model, tokens())
        for loop in range(3):
            s = plain_loop(model, s, e, loop)
            n = plain_readout(model, s)
            torch.testing.assert_close(ends.states[loop], n, rtol=1e-9, atol=1e-11)
            if not model.coda:
                logit = n @ model.depth.gate.weight[0] + model.depth.gate.bias
                torch.testing.assert_close(ends.logits[loop], logit, rtol=1e-9, atol=1e-11)


def test_a_gate_starts_at_even_odds_after_every_other_initialisation():
    depth = LoopLM(config_of(depth="gate")).depth
    assert not depth.gate.weight.any() and not depth.gate.bias.any()
