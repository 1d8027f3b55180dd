"""Compute held-out loss in nats per token and in bits per byte."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.data.source import Source
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.state import Draws, LoopState
from deeploop.utils.device import autocast
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError

Stop = Callable[[int], bool]


def held_out_targets(corpus: Source, tokens: int) -> int:
    """Return how many held-out targets a validation of `tokens` of them predicts; 0 means all."""
    every = corpus.held_out_targets
    return min(tokens, every) if tokens else every


def validate(
    model: LoopLM,
    corpus: Source,
    batch: int,
    precision: str,
    tokens: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
    stop: Stop = lambda done: False,
    observe: Callable[[Tensor, Tensor], None] | None = None,
) -> float | None:
    """Return the mean cross-entropy in nats per held-out token.

    Args:
        batch: sequences per forward pass.
        precision: "bf16" or "fp32".
        tokens: predict the first so many held-out targets; 0 predicts all.
        ranks: the batches are dealt out to these in turn, and every rank returns the mean.
        stop: called on every rank after each batch of its own with the number of targets read by
            all ranks; the validation ends where it returns True on any rank.
        observe: called with the final states and the targets of each batch of this rank.

    Returns:
        The mean; None where `stop` ended the validation. It depends neither on `batch` nor on
        the number of ranks, but for the rounding of sums.

    Every token of a text but the first is a target once, in windows of `seq_len` without overlap.
    No expert drops a token: a capacity would make a token's loss depend on later tokens,
    on the other sequences of its batch and on padding. (LOOM's released code keeps its
    capacity in validation.)
    """
    total = torch.zeros((), dtype=torch.float64, device=model.head.device)

    def add(inputs: Tensor, targets: Tensor) -> None:
        n = model(inputs)
        total.add_(linear_cross_entropy(n, model.head, targets))
        if observe is not None:
            observe(n, targets)

    if not read_held_out(model, corpus, batch, precision, add, tokens, ranks, stop):
        return None
    ranks.all_reduce_([total])
    return float(total) / held_out_targets(corpus, tokens)


def validate_after(
    model: LoopLM,
    corpus: Source,
    loops: Iterable[int],
    batch: int,
    precision: str,
    tokens: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
    stop: Stop = lambda done: False,
    observe: Callable[[int, Tensor, Tensor], None] | None = None,
) -> dict[int, float] | None:
    """Return the mean cross-entropy after each of several numbers of loops, from one pass.

    The figure of t loops is that of `validate` for a model that runs t, but for rounding.

    Args:
        loops: numbers of loops, each at least 1.
        observe: called with t, the final states and the targets of each batch of this rank.

    The others, None and the errors are those of `validate` and `run_loops`.
    """
    zero = torch.zeros((), dtype=torch.float64, device=model.head.device)
    totals = {t: zero.clone() for t in sorted(set(loops))}

    def add(inputs: Tensor, targets: Tensor) -> None:
        def read(t: int, s: LoopState) -> None:
            if t in totals:
                n = model.coda_output(model.after_loops(s), inputs)
                totals[t] += linear_cross_entropy(n, model.head, targets)
                if observe is not None:
                    observe(t, n, targets)

        run_loops(model, inputs, max(totals), read)

    if not read_held_out(model, corpus, batch, precision, add, tokens, ranks, stop):
        return None
    ranks.all_reduce_(totals.values())
    return {t: float(total) / held_out_targets(corpus, tokens) for t, total in totals.items()}


def run_loops(
    model: LoopLM,
    tokens: Tensor,
    loops: int,
    read: Callable[[int, LoopState], None],
    state: LoopState | None = None,
    draws: Draws = Draws(),  # noqa: B008
) -> LoopState:
    """Run loops and read the state after each; returns the one after the last.

    Args:
        tokens: int64 [B, T].
        loops: to run, at least 1.
        read: called with t = 1, 2, ... and the state after t loops, for `LoopLM.after_loops`.
            It is that of a forward through t loops.
        state: before the first loop; None: as model.start says.
        draws: as for `LoopLM.forward`.

    Raises:
        InputError: the depth rule does not run loop by loop.
    """
    done = 0

    def on_loop(s: LoopState) -> None:
        nonlocal done
        done += 1
        read(done, s._replace(n=None))  # n is normed for the loop after

    s = model.run(tokens, range(loops), state, on_loop=on_loop, draws=draws)
    if done != loops:
        raise InputError(
            f"model.depth={model.config.depth}: gives {done} states for {loops} loops, so that "
            "there is none to read after each; evaluate it at one number of loops"
        )
    return s


@torch.no_grad()
def read_held_out(
    model: LoopLM,
    corpus: Source,
    batch: int,
    precision: str,
    add: Callable[[Tensor, Tensor], None],
    tokens: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
    stop: Stop = lambda done: False,
) -> bool:
    """Call `add` with each held-out batch of this rank, the model in eval mode.

    Args:
        add: takes tokens and targets, int64 [B, T] on the model's device, IGNORE where the last
            sequence is padded; it runs without gradient, in the given precision.

    The others are those of `validate`. Returns False where `stop` ended it.
    """
    seq_len, device = model.config.seq_len, model.head.device
    count = held_out_targets(corpus, tokens)
    training = model.training
    model.eval()
    batches, done = corpus.held_out(batch, seq_len, count), 0
    try:
        for index, (inputs, targets) in enumerate(batches):
            done += int((targets != IGNORE).sum())
            if index % ranks.world == ranks.rank:
                with autocast(device, precision):
                    add(inputs.to(device), targets.to(device))
            last = index % ranks.world == ranks.world - 1
            if last and ranks.any_rank(stop(done)):  # a message between ranks, once a round
                return False
    finally:
        model.train(training)
    return True


def bits_per_byte(nats_per_token: float, corpus: Source, tokens: int = 0) -> float | None:
    """Convert nats per token to bits per UTF-8 byte of the text that was predicted.

    Args:
        nats_per_token: what `validate` returned.
        tokens: as for `validate`; 0 means all.

    Returns:
        The bits; None where the corpus has no byte count.
    """
    per_token = corpus.first_bytes_per_token(held_out_targets(corpus, tokens) + 1)
    return None if per_token is None else nats_per_token / math.log(2) / per_token
