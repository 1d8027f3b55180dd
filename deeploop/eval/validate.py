"""Compute held-out loss in nats per token and in bits per byte."""

import math
from collections.abc import Callable

import torch

from deeploop.data.batches import val_batches
from deeploop.data.corpus import Corpus
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.utils.device import autocast
from deeploop.utils.distributed import Ranks


def held_out_targets(corpus: Corpus, tokens: int) -> int:
    """Return how many held-out tokens a validation of `tokens` tokens predicts; 0 means all."""
    every = len(corpus.val) - 1
    return min(tokens, every) if tokens else every


@torch.no_grad()
def validate(
    model: LoopLM,
    corpus: Corpus,
    batch: int,
    precision: str,
    tokens: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
    stop: Callable[[int], bool] = lambda done: False,
) -> float | None:
    """Return the mean cross-entropy in nats per held-out token.

    Args:
        batch: sequences per forward pass.
        precision: "bf16" or "fp32".
        tokens: predict the first so many targets of `corpus.val`; 0 predicts all.
        ranks: the batches are dealt out to these in turn, and every rank returns the mean.
        stop: called on every rank after each batch of its own with the number of targets read by
            all ranks; the validation ends where it returns True on any rank.

    Returns:
        The mean; None where `stop` ended the validation. It depends neither on `batch` nor on
        the number of ranks, but for the rounding of sums.

    Every token but the first is a target once, in windows of `seq_len` without overlap.
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
    batches = val_batches(corpus.val, batch=batch, seq_len=seq_len, targets=count)
    try:
        for index, (inputs, targets) in enumerate(batches):
            if index % ranks.world == ranks.rank:
                with autocast(device, precision):
                    n = model(inputs.to(device))
                    total += linear_cross_entropy(n, model.head, targets.to(device))
            if index % ranks.world == ranks.world - 1:  # a message between ranks, once a round
                done = min(count, (index + 1) * batch * seq_len)
                if ranks.any_rank(stop(done)):
                    return None
    finally:
        model.train(training)
    ranks.all_reduce_([total])
    return float(total) / count


def bits_per_byte(nats_per_token: float, corpus: Corpus) -> float | None:
    """Convert nats per token to bits per UTF-8 byte; None where the corpus has no byte count."""
    per_token = corpus.bytes_per_token
    return None if per_token is None else nats_per_token / math.log(2) / per_token
