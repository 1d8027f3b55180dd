"""Mixture-of-Recursions written token by token, to compare its depth rules with."""

import dataclasses

import torch

from deeploop.model.looplm import LoopLM
from tests.helpers.plain_model import plain_loop, plain_readout, plain_start, scattered
from tests.model.test_borders import config_of


def mor_config(depth, moe=None, model=None, **mor):
    m = config_of(**{"depth": depth} | (model or {}))
    moe = dataclasses.replace(m.moe, **moe or {})
    return dataclasses.replace(m, mor=dataclasses.replace(m.mor, **mor), moe=moe)


def mor_model(depth, **fields):
    torch.manual_seed(0)
    return scattered(LoopLM(mor_config(depth, **fields)))


def plain_mor(model, ids, take_part, loops=None):
    """Final states [B, T, d_model], with which tokens took part in each loop.

    take_part: called with a sequence's streams [T, d_model], the loop and the positions that took
    part in the loop before; returns the positions that do in this one and their weights.
    """
    c, (e, s) = model.config, plain_start(model, ids)
    B, T = ids.shape
    before, history = [list(range(T)) for _ in range(B)], []
    for loop in range(c.loops if loops is None else loops):
        chosen = [take_part(s.h[b], loop, before[b]) for b in range(B)]
        before = [list(weights) for weights in chosen]
        seen = torch.tensor([[t in row for t in range(T)] for row in before])
        after, h = plain_loop(model, s, e, loop, seen), s.h.unbind(0)
        streams = [list(row) for row in h]
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
        history.append(seen)
    return plain_readout(model, s), torch.stack(history)
