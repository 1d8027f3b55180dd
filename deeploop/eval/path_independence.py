"""Measure whether the loops end in the same states from different starts.

    model.start=noise      n draws of the noise; all pairs of them are compared
    model.start=embedding  the state after the first loop, and in its place the end states of
                           n - 1 other sequences, from which the loops from the second on run
                           again; each is compared with the first

Of two states a, b of a token: their cosine, and ||a - b|| over the mean of both norms. Under
start=embedding the cosine after many loops is the asymptotic alignment score.

Source: Anil et al., arXiv 2211.09961 (restarts from the end states of all other inputs).
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from deeploop.data.batches import IGNORE, val_batches
from deeploop.data.corpus import Corpus
from deeploop.eval.validate import held_out_targets
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.noise import sequence_keys
from deeploop.model.state import Draws, LoopState
from deeploop.utils.device import autocast
from deeploop.utils.errors import InputError


class Starts(NamedTuple):
    """States after the first loop, or in its place, and which of them are compared."""

    states: list[LoopState]
    pairs: list[tuple[int, int]]


@torch.no_grad()
def measure_starts(
    model: LoopLM,
    corpus: Corpus,
    loops: Sequence[int],
    starts: int,
    batch: int,
    precision: str,
    tokens: int = 0,
) -> dict[str, Any]:
    """Compare the states that one held-out batch reaches from several starts.

    Args:
        model: in eval mode.
        loops: after which to compare, ascending.
        starts: n, at least 2.
        batch, precision, tokens: as for `deeploop.eval.validate.validate`; the batch is its first.

    Returns:
        loops; cosine and distance, means over tokens and pairs by these loops; loss_spread, the
        largest of the starts' mean losses minus the smallest, nats, by these loops.

    Raises:
        InputError: the model or the batch allows no such starts.
    """
    check_starts(model, loops, starts)
    c, device = model.config, model.head.device
    count = held_out_targets(corpus, tokens)
    inputs, targets = next(val_batches(corpus.val, batch=batch, seq_len=c.seq_len, targets=count))
    inputs, targets = inputs.to(device), targets.to(device)
    with autocast(device, precision):
        if c.start == "noise":
            states, pairs = noise_starts(model, inputs, starts)
        else:
            states, pairs = exchanged_starts(model, inputs, max(loops), starts)
        rows, done = [], 1
        for t in loops:
            if t > done:
                states = [model.detach(model.run(inputs, range(done, t), s)) for s in states]
                done = t
            rows.append(compare(model, states, pairs, inputs, targets))
    names = ("cosine", "distance", "loss_spread")
    columns = [list(column) for column in zip(*rows, strict=True)]
    return {"loops": list(loops), **dict(zip(names, columns, strict=True))}


def check_starts(model: LoopLM, loops: Sequence[int], starts: int) -> None:
    """Refuse what has no other starts; raises InputError."""
    if starts < 2:
        raise InputError(f"starts={starts}: needs at least 2, to compare them")
    if not model.borders.uses_input:
        raise InputError(
            f"starts={starts}: the loops of model.residual={model.config.residual} without "
            "model.inject read their tokens in the start state alone, which another start would "
            "replace; leave it out"
        )
    if max(loops) < 2:
        raise InputError(f"starts={starts}: needs at least 2 loops, and they are {max(loops)}")


def noise_starts(model: LoopLM, tokens: Tensor, starts: int) -> Starts:
    """Run the first loop from several draws of the noise."""
    rows = range(len(tokens))
    draws = [Draws(sequence_keys(0, j, rows).to(tokens.device)) for j in range(starts)]
    states = [model.detach(model.run(tokens, range(1), draws=d)) for d in draws]
    return Starts(states, list(itertools.combinations(range(starts), 2)))


def exchanged_starts(model: LoopLM, tokens: Tensor, loops: int, starts: int) -> Starts:
    """Run the first loop, and take the end states of other sequences in the place of its state."""
    if len(tokens) < starts:
        raise InputError(
            f"starts={starts}: each takes the end state of another sequence, and the batch has "
            f"{len(tokens)}; give a larger --batch-size, more --tokens or fewer starts"
        )
    first = model.detach(model.run(tokens, range(1)))
    end = model.detach(model.run(tokens, range(1, loops), first))._replace(depth=None)
    others = [tree_map(lambda x, j=j: None if x is None else x.roll(j, 0), end)
              for j in range(1, starts)]  # fmt: skip
    return Starts([first, *others], [(0, j) for j in range(1, starts)])


def compare(
    model: LoopLM,
    states: Sequence[LoopState],
    pairs: Sequence[tuple[int, int]],
    tokens: Tensor,
    targets: Tensor,
) -> tuple[float, float, float]:
    """Return cosine, distance and spread of the losses of some states after the same loops."""
    keep = targets != IGNORE
    streams = [s.h[keep] for s in states]
    norms = [h.norm(dim=-1) for h in streams]
    cosines = [F.cosine_similarity(streams[i], streams[j], dim=-1).mean() for i, j in pairs]
    distances = [
        (2 * (streams[i] - streams[j]).norm(dim=-1) / (norms[i] + norms[j])).mean()
        for i, j in pairs
    ]
    losses = torch.stack([
        linear_cross_entropy(model.coda_output(model.after_loops(s), tokens), model.head, targets)
        for s in states
    ]) / keep.sum()  # fmt: skip
    spread = losses.max() - losses.min()
    return torch.stack(cosines).mean().item(), torch.stack(distances).mean().item(), spread.item()
