"""Compute held-out loss in nats per token and in bits per byte."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.data.source import Source
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.utils.device import autocast
from deeploop.utils.distributed import Ranks


def held_out_targets(corpus: Source, tokens: int) -> int:
    """Return how many held-out targets a validation of `tokens` of them predicts; 0 means all."""
    every = corpus.held_out_targets
    return min(tokens, every) if tokens else every


@torch.no_grad()
def validate(
    model: LoopLM,
    corpus: Source,
    batch: int,
    precision: str,
    tokens: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
    stop: Callable[[int], bool] = lambda done: False,
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
    seq_len = model.config.seq_len
    device = model.embed_tokens.weight.device
    count = held_out_targets(corpus, tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    batches, done = corpus.held_out(batch, seq_len, count), 0
    try:
        for index, (inputs, targets) in enumerate(batches):
            done += int((targets != IGNORE).sum())
            if index % ranks.world == ranks.rank:
                with autocast(device, precision):
                    n, targets = model(inputs.to(device)), targets.to(device)
                    total += linear_cross_entropy(n, model.head, targets)
                    if observe is not None:
                        observe(n, targets)
            last = index % ranks.world == ranks.world - 1
            if last and ranks.any_rank(stop(done)):  # a message between ranks, once a round
                return None
    finally:
        model.train(training)
    ranks.all_reduce_([total])
    return float(total) / count


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
