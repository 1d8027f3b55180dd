"""Measure whether the loops end in the same states from different starts.

    model.start=noise      n draws of the noise
    model.start=embedding  the usual start, and n - 1 others: the end states of other sequences
                           (an input that the first loop does not mix in, as it is its start,
                           then joins in the second)

The states from each other start are compared with those from the first: of each token the cosine,
and ||a - b|| over the mean of both norms. Under start=embedding the cosine after many loops is the
asymptotic alignment score.

Source: Anil et al., arXiv 2211.09961 (restarts from the end states of all other inputs).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.data.source import Source
from deeploop.eval.validate import held_out_targets, run_loops
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.noise import sequence_keys
from deeploop.model.state import Draws, LoopState
from deeploop.utils.device import autocast
from deeploop.utils.errors import InputError


class Start(NamedTuple):
    """Where the loops begin."""

    draws: Draws = Draws()
    state: LoopState | None = None  # before the first loop; None: as model.start says


@torch.no_grad()
def measure_starts(
    model: LoopLM,
    corpus: Source,
    loops: Sequence[int],
    starts: int,
    batch: int,
    precision: str,
    tokens: int = 0,
) -> dict[str, Any]:
    """Compare the states that one held-out batch reaches from several starts.

    Args:
        model: in eval mode.
        loops: after which to compare, ascending; the streams after each are kept.
        starts: n, at least 2.
        batch, precision, tokens: as for `deeploop.eval.validate.validate`; the batch is its first.

    Returns:
        loops; cosine and distance, means over tokens and starts by these loops; loss_spread, the
        largest of the starts' mean losses minus the smallest, nats, by these loops.

    Raises:
        InputError: the model or the batch allows no such starts.
    """
    check_starts(model, loops, starts)
    c, device = model.config, model.head.device
    count = held_out_targets(corpus, tokens)
    inputs, targets = next(corpus.held_out(batch, c.seq_len, count))
    inputs, targets = inputs.to(device), targets.to(device)
    with autocast(device, precision):
        make = noise_starts if c.start == "noise" and c.start_std else exchanged_starts
        first: list[Tensor] = []
        compared, losses = [], []
        for start in make(model, inputs, max(loops), starts):
            streams, nats = ends(model, inputs, targets, loops, start)
            losses.append(nats)
            if first:
                pairs = zip(first, streams, strict=True)
                compared.append(torch.stack([alike(a, b) for a, b in pairs]))
            first = first or streams
    cosine, distance = torch.stack(compared).mean(0).T.tolist()
    by_start = torch.tensor(losses, dtype=torch.float64)
    spread = (by_start.amax(0) - by_start.amin(0)).tolist()
    return {"loops": list(loops), "cosine": cosine, "distance": distance, "loss_spread": spread}


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


def noise_starts(model: LoopLM, tokens: Tensor, loops: int, starts: int) -> Iterator[Start]:
    """Yield so many draws of the noise; tokens int64 [B, T]."""
    for j in range(starts):
        yield Start(Draws(sequence_keys(0, j, range(len(tokens))).to(tokens.device)))


def exchanged_starts(model: LoopLM, tokens: Tensor, loops: int, starts: int) -> Iterator[Start]:
    """Yield the usual start, then the end states, after `loops` loops, of other sequences."""
    if len(tokens) < starts:
        raise InputError(
            f"starts={starts}: each takes the end state of another sequence, and the batch has "
            f"{len(tokens)}; give a larger --batch-size, more --tokens or fewer starts"
        )
    yield Start()
    end = model.run(tokens, range(loops)).h
    for j in range(1, starts):
        yield Start(state=LoopState(end.roll(j, 0)))


def ends(
    model: LoopLM, tokens: Tensor, targets: Tensor, loops: Sequence[int], start: Start
) -> tuple[list[Tensor], list[float]]:
    """Return the streams [targets, d_model] and mean losses after these numbers of loops.

    Args:
        tokens, targets: int64 [B, T].
        loops: ascending.
        start: where the loops begin.
    """
    keep, streams, losses = targets != IGNORE, [], []

    def read(t: int, s: LoopState) -> None:
        if t in loops:
            n = model.coda_output(model.after_loops(s), tokens)
            streams.append(s.h[keep])
            losses.append((linear_cross_entropy(n, model.head, targets) / keep.sum()).item())

    run_loops(model, tokens, max(loops), read, start.state, start.draws)
    return streams, losses


def alike(a: Tensor, b: Tensor) -> Tensor:
    """Return mean cosine and mean relative distance of two streams [tokens, d_model]: [2]."""
    norms = a.norm(dim=-1) + b.norm(dim=-1)
    distance = 2 * (a - b).norm(dim=-1) / norms
    return torch.stack([F.cosine_similarity(a, b, dim=-1).mean(), distance.mean()])
