"""Compute the bits per token that unigram and bigram counts reach on held-out text."""

from collections.abc import Iterator

import numpy as np

from deeploop.data.stream import BLOCK, TokenStream
from deeploop.utils.errors import InputError

BIGRAM_VOCAB = 4096  # above it the table of pairs would not fit: 4096^2 int64 are 128 MiB


def ngram_bits(
    train: TokenStream, val: TokenStream, vocab_size: int, max_tokens: int = 100_000_000
) -> tuple[float, float | None]:
    """Return the bits per token of val under unigram and under bigram counts of train.

    A model that does not beat them has learnt nothing beyond the frequencies of tokens
    and pairs. Counts have add-one smoothing. Both are means over the same targets: all
    tokens of val but the first. Only the first ``max_tokens`` of each stream are read.
    The bigram is None for vocabularies above BIGRAM_VOCAB.
    """
    pairs = vocab_size <= BIGRAM_VOCAB
    singles = np.zeros(vocab_size, np.int64)
    doubles = np.zeros((vocab_size, vocab_size) if pairs else (0, 0), np.int64)
    for block in _overlapping(train, max_tokens):
        singles += np.bincount(block[1:], minlength=vocab_size)
        if pairs:
            flat = np.bincount(block[:-1] * vocab_size + block[1:], minlength=vocab_size**2)
            doubles += flat.reshape(doubles.shape)
    log_single = np.log2((singles + 1) / (singles.sum() + vocab_size))
    context = doubles.sum(axis=1)
    bits, count = np.zeros(2), 0
    for block in _overlapping(val, max_tokens):
        before, after = block[:-1], block[1:]
        count += len(after)
        bits[0] -= log_single[after].sum()
        if pairs:
            bits[1] -= np.log2((doubles[before, after] + 1) / (context[before] + vocab_size)).sum()
    if not count:
        raise InputError(f"the validation split has {len(val)} tokens; at least 2 are needed")
    return float(bits[0] / count), float(bits[1] / count) if pairs else None


def _overlapping(stream: TokenStream, limit: int) -> Iterator[np.ndarray]:
    """Read blocks that overlap by one token, so that each pair of neighbours is in just one."""
    stop = min(limit, len(stream))
    for start in range(0, stop - 1, BLOCK):
        yield stream.read(start, min(BLOCK + 1, stop - start))
