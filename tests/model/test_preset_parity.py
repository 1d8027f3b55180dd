"""Each paper's small preset equals a plain float64 model: outputs and all gradients."""

import dataclasses

import pytest
import torch

from deeploop.config import MorConfig
from deeploop.config.presets import presets
from deeploop.model.looplm import LoopLM
from tests.helpers.plain_model import (
    check_gradients,
    plain_forward,
    plain_loop,
    plain_readout,
    plain_start,
    scattered,
)
from tests.model.depth.test_act import plain_act
from tests.model.depth.test_expert_choice import plain as plain_expert_choice
from tests.model.test_borders import tokens
from tests.model.test_lora import unrolled


def plain_damped(model, ids):
    """The loops of a fixed point with gradient: s <- tau f(s) + (1 - tau) s."""
    tau, (e, s) = model.config.solver.damping, plain_start(model, ids)
    for loop in range(model.config.loops):
        s = s._replace(h=tau * plain_loop(model, s, e, loop).h + (1 - tau) * s.h)
    return plain_readout(model, s)


PLAIN = {"ut-tiny": plain_act, "mor-tiny": plain_expert_choice, "deq-tiny": plain_damped}
TINY = [name for name in presets() if name.endswith("-tiny") and name not in ("rrt-tiny",)]


def model_of(name):
    m = presets()[name].model
    # Of 6 tokens 4 and 2 take part in loops 2 and 3, and no expert drops one.
    mor, moe = MorConfig(capacity="1,.67,.34"), dataclasses.replace(m.moe, capacity_factor=0.0)
    m = dataclasses.replace(m, vocab_size=31, seq_len=8, mor=mor, moe=moe)
    torch.manual_seed(0)
    model = scattered(LoopLM(m))
    for name, p in model.named_parameters():
        if "adapters" in name:
            p.data.normal_(std=0.1)
    return model


def test_every_paper_has_a_small_preset():
    papers = {name.split("-")[0] for name in presets()} - {"gpt2"}
    assert papers == {name.split("-")[0] for name in (*TINY, "rrt-tiny")}


@pytest.mark.parametrize("name", TINY)
def test_a_preset_is_its_definition(name):
    model = model_of(name)
    model.train()
    check_gradients(model, tokens(1, 6), PLAIN.get(name, plain_forward), rtol=1e-9, atol=1e-9)


def test_the_relaxed_preset_is_a_model_without_loops():
    """Whose matrices are the shared ones plus each loop's own; its gradients: `test_lora`."""
    model = model_of("rrt-tiny")
    plain = plain_forward(unrolled(model), tokens(1, 6))
    torch.testing.assert_close(model(tokens(1, 6)), plain, rtol=1e-9, atol=1e-9)
