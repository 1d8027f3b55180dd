"""Mixture-of-Recursions written token by token, to compare its depth rules with."""

import dataclasses

import torch

from deeploop.config import Config, TrainConfig
from deeploop.config.backprop import segments
from deeploop.model.looplm import LoopLM
from deeploop.train.backprop import MicroBatch, run_segment
from tests.helpers.plain_model import plain_loop, plain_readout, plain_start, scattered
from tests.model.test_borders import config_of, tokens


def mor_config(depth, moe=None, model=None, **mor):
    m = config_of(**{"depth": depth} | (model or {}))
    moe = dataclasses.replace(m.moe, **moe or {})
    return dataclasses.replace(m, mor=dataclasses.replace(m.mor, **mor), moe=moe)


def mor_model(depth, **fields):
    torch.manual_seed(0)
    return scattered(LoopLM(mor_config(depth, **fields)))


def plain_mor(model, ids, take_part, loops=None):
    """Final states [B, T, d_model].

    take_part: called with a sequence's index and streams [T, d_model], the loop and the positions
    that took part in the loop before; returns those that do in this one, and their weights.
    """
    c, (e, s) = model.config, plain_start(model, ids)
    B, T = ids.shape
    before = [list(range(T)) for _ in range(B)]
    first = {} if c.mor.kv == "first" else None
    for loop in range(c.loops if loops is None else loops):
        chosen = [take_part(b, s.h[b], loop, before[b]) for b in range(B)]
        before = [list(weights) for weights in chosen]
        seen = torch.tensor([[t in row for t in range(T)] for row in before])
        after = plain_loop(model, s, e, loop, seen if first is None else None, first)
        streams = [list(row) for row in s.h]
        for b in range(B):
            for t, w in chosen[b].items():
                f = after.h[b, t]
                moved = w * f if c.mor.output == "released" else w * (f - s.h[b, t])
                streams[b][t] = s.h[b, t] + moved
        if after.memory is not None:  # of LOOM
            old = s.memory or type(after.memory)()
            zero = torch.zeros_like(s.h)
            memory = [
                x if x is None else torch.where(seen[..., None], x, zero if y is None else y)
                for x, y in zip(after.memory, old, strict=True)
            ]
            after = after._replace(memory=type(after.memory)(*memory))
        s = after._replace(h=torch.stack([torch.stack(row) for row in streams]))
    return plain_readout(model, s)


def plain_like(model):
    """The model without routing, with the same weights."""
    fixed = scattered(LoopLM(dataclasses.replace(model.config, depth="fixed")))
    fixed.load_state_dict(model.state_dict(), strict=False)
    return fixed.train(model.training)


def with_scale(model, scale):
    """Another factor of the routers' weights."""
    m = model.depth.config
    model.depth.config = dataclasses.replace(m, mor=dataclasses.replace(m.mor, scale=scale))
    return model


def reach(model):
    """Which positions of the output a change of each token reaches: bool [T, T]."""
    ids = tokens(batch=1)
    changed = ids.repeat(ids.shape[1], 1)
    changed.diagonal().copy_((changed.diagonal() + 7) % 31)
    return ((model(ids) - model(changed)).abs() > 1e-9).any(-1)


def run_of(model, **train):
    train = TrainConfig(**{"batch_size": 4, "precision": "fp32"} | train)
    return Config(model=model.config, train=train)


def gradients(model, config, batch=4, micro=4):
    model.zero_grad()
    ids = tokens(batch)
    for first in range(0, batch, micro):
        x = ids[first : first + micro]
        state = None
        for segment in segments(config.train, config.model.loops):
            result = run_segment(model, config, segment, MicroBatch(x, x.roll(-1, 1)), state)
            state = result.state
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
