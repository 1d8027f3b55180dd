"""Bits per token of unigram and bigram counts."""

import numpy as np
import pytest

from deeploop.data.ngrams import ngram_bits
from tests.helpers.data import refused, stream_of


def test_ngram_bits_by_hand(monkeypatch):
    train, val = stream_of([0, 1, 0, 1, 0, 2], 3), stream_of([0, 1, 0, 2], 3)
    for block in (1, 2, 1000):  # blocks share their ends: no pair is lost or doubled
        monkeypatch.setattr("deeploop.data.ngrams.BLOCK", block)
        unigram, bigram = ngram_bits(train, val, 3)
        # targets of train: 1 0 1 0 2; pairs 01 10 01 10 02; targets of val: 1 0 2
        assert unigram == pytest.approx(-np.log2((3 / 8) * (3 / 8) * (2 / 8)) / 3)
        assert bigram == pytest.approx(-np.log2((3 / 6) * (3 / 5) * (2 / 6)) / 3)
        longer = stream_of([0, 1, 0, 1, 0, 2, 2, 2, 2], 3), stream_of([0, 1, 0, 2], 3)
        assert ngram_bits(*longer, 3, max_tokens=6) == pytest.approx((unigram, bigram))
    assert ngram_bits(train, val, 5000)[1] is None
    refused(lambda: ngram_bits(train, val.view(0, 1), 3), "1 tokens")
