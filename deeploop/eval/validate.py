"""Compute held-out loss in nats per token and in bits per byte."""

import math

import torch

from deeploop.data.batches import IGNORE, val_batches
from deeploop.data.corpus import Corpus
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.utils.device import autocast
from deeploop.utils.distributed import Ranks


@torch.no_grad()
def validate(
    model: LoopLM,
    corpus: Corpus,
    batch: int,
    precision: str,
    tokens: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> float:
    """Return the mean cross-entropy in nats per held-out token.

    Args:
        batch: sequences per forward pass.
        precision: "bf16" or "fp32".
        tokens: stop after about so many tokens; 0 reads all of `corpus.val`.
        ranks: the batches are dealt out to these in turn, and every rank returns the mean.

    Every token but the first is a target once, in windows of `seq_len` without overlap.
    No expert drops a token: a capacity would make a token's loss depend on later tokens,
    on the other sequences of its batch and on padding. (LOOM's released code keeps its
    capacity in validation.)
    """
    seq_len = model.config.seq_len
    device = model.embed_tokens.weight.device
    limit = -(-tokens // (batch * seq_len)) if tokens else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    training = model.training
    model.eval()
    batches = val_batches(corpus.val, batch=batch, seq_len=seq_len, max_batches=limit)
    try:
        for index, (inputs, targets) in enumerate(batches):
            count += int((targets != IGNORE).sum())
            if index % ranks.world != ranks.rank:
                continue
            with autocast(device, precision):
                n = model(inputs.to(device))
                total += linear_cross_entropy(n, model.head, targets.to(device))
    finally:
        model.train(training)
    ranks.all_reduce_([total])
    return float(total) / count


def bits_per_byte(nats_per_token: float, corpus: Corpus) -> float | None:
    """Convert nats per token to bits per UTF-8 byte; None where the corpus has no byte count."""
    per_token = corpus.bytes_per_token
    return None if per_token is None else nats_per_token / math.log(2) / per_token
