"""Training batches in a reproducible order, and validation batches that cover every target."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deeploop.data.batches import permute, train_batch, train_starts, val_batches, windows_per_epoch
from tests.helpers.data import refused, stream_of

# The training order


@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_the_shuffle_is_a_bijection(count, key):
    index = np.arange(count, dtype=np.uint64)
    out = permute(index, count, np.full(count, key, np.uint64))
    assert np.array_equal(np.sort(out), index)


def test_the_shuffle_reaches_far_beyond_memory():
    count = (1 << 40) + 7
    index = np.arange(0, count, count // 1000, dtype=np.uint64)
    out = permute(index, count, np.zeros_like(index))
    assert out.max() < count and len(np.unique(out)) == len(index)
    assert abs(float(out.mean()) / count - 0.5) < 0.05


def test_the_shuffle_favours_no_place():
    """Over 20000 keys each of 6 items comes to each of 6 places about equally often."""
    keys = np.arange(20000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for index in range(6):
        out = permute(np.full(len(keys), index, np.uint64), 6, keys)
        counts = np.bincount(out.astype(int), minlength=6)
        assert abs(counts / len(keys) - 1 / 6).max() < 0.03


@settings(max_examples=60)
@given(
    tokens=st.integers(2, 400),
    seq_len=st.integers(1, 40),
    batch=st.integers(1, 9),
    seed=st.integers(-(2**65), 2**65),
    epoch=st.integers(0, 1 << 20),
)
def test_each_window_is_seen_once_per_epoch(tokens, seq_len, batch, seed, epoch):
    if tokens < seq_len + 1:
        refused(lambda: windows_per_epoch(tokens, seq_len), tokens, seq_len + 1)
        return
    count = windows_per_epoch(tokens, seq_len)
    first = epoch * count
    starts = np.concatenate(
        [
            train_starts(
                tokens, seed=seed, step=step, global_batch=batch, seq_len=seq_len, rows=slice(None)
            )
            for step in range(first // batch, (first + count) // batch + 1)
        ]
    )[first % batch :][:count]
    phase = starts.min()
    assert np.array_equal(np.sort(starts), phase + seq_len * np.arange(count))
    assert phase >= 0 and starts.max() + seq_len + 1 <= tokens


def test_epochs_and_seeds_differ_in_order_and_phase():
    def epoch(number, seed=0):
        count = windows_per_epoch(10_000, 16)
        return train_starts(
            10_000, seed=seed, step=number, global_batch=count, seq_len=16, rows=slice(None)
        )

    runs = [epoch(0), epoch(1), epoch(2), epoch(0, seed=1), epoch(0, seed=2)]
    assert len({tuple(run) for run in runs}) == len(runs)
    assert len({int(run.min()) for run in runs}) > 2
    reached = {int(s) for e in range(400) for s in (epoch(e).min(), epoch(e).max() + 16)}
    assert {0, 9_999} <= reached  # no token is left out for good, at either end


def test_training_order_is_pinned():
    """A run resumed under a later version must read on where it stopped."""
    starts = train_starts(10_000, seed=7, step=3, global_batch=4, seq_len=16, rows=slice(None))
    assert starts.tolist() == [496, 3168, 5024, 8336]


@settings(max_examples=40)
@given(data=st.data(), step=st.integers(0, 10**9), ranks=st.integers(1, 5))
def test_any_split_of_a_batch_reads_the_same_sequences(data, step, ranks):
    stream = stream_of(np.arange(999) * 7 % 1000, segments=5)
    common = {"seed": 3, "step": step, "global_batch": 12, "seq_len": 10}
    inputs, targets = train_batch(stream, **common, rows=slice(None))
    cuts = sorted(data.draw(st.lists(st.integers(0, 12), max_size=4)))
    spans = [range(a, b) for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
    parts = [train_batch(stream, **common, rows=span) for span in spans]
    assert torch.equal(torch.cat([x for x, _ in parts]), inputs)
    assert torch.equal(torch.cat([y for _, y in parts]), targets)
    for rank in range(ranks):  # interleaved over ranks
        x, y = train_batch(stream, **common, rows=slice(rank, None, ranks))
        assert torch.equal(x, inputs[rank::ranks]) and torch.equal(y, targets[rank::ranks])


def test_batches_are_next_token_pairs_across_shards():
    tokens = np.arange(500)
    for segments in (1, 7, 200):  # windows of 33 tokens cross many shards of 2 or 3
        stream = stream_of(tokens, segments=segments)
        x, y = train_batch(stream, seed=0, step=2, global_batch=8, seq_len=32, rows=slice(2, 6))
        assert x.shape == y.shape == (4, 32) and x.dtype == y.dtype == torch.int64
        assert x.is_contiguous() and y.is_contiguous()
        assert torch.equal(y, x + 1)


def test_rows_outside_the_batch_and_short_corpora_are_refused():
    stream = stream_of(range(50))
    with pytest.raises(IndexError):
        train_batch(stream, seed=0, step=0, global_batch=4, seq_len=8, rows=range(2, 5))
    refused(
        lambda: train_batch(stream, seed=0, step=0, global_batch=4, seq_len=50, rows=range(4)),
        "50 tokens",
        "seq_len + 1 = 51",
    )
    x, _ = train_batch(stream, seed=0, step=0, global_batch=4, seq_len=49, rows=range(4))
    assert x.tolist() == [list(range(49))] * 4  # just one window, and it fits
    assert train_batch(stream, seed=0, step=0, global_batch=4, seq_len=8, rows=range(0))[
        0
    ].shape == (0, 8)


def test_an_id_outside_the_vocabulary_never_reaches_the_model():
    stream = stream_of([1] * 70 + [900] + [1] * 29, vocab_size=900, segments=2)
    refused(
        lambda: [
            train_batch(stream, seed=0, step=s, global_batch=8, seq_len=9, rows=slice(None))
            for s in range(3)
        ],
        "segment 1",
        "id 900",
        "offset 20",
    )
    refused(lambda: list(val_batches(stream, batch=2, seq_len=9)), "segment 1", "id 900")


# Validation


@given(
    tokens=st.integers(0, 300),
    batch=st.integers(1, 5),
    seq_len=st.integers(1, 40),
    limit=st.none() | st.integers(1, 400),
)
def test_validation_covers_the_first_targets_once_whatever_the_batch(tokens, batch, seq_len, limit):
    seen: list[int] = []
    stream = stream_of(range(tokens), segments=3)
    for x, y in val_batches(stream, batch=batch, seq_len=seq_len, targets=limit):
        assert x.shape == y.shape and 1 <= len(x) <= batch and x.shape[1] == seq_len
        real = y != -100
        assert real.any(dim=1).all()
        assert torch.equal(x[real] + 1, y[real]) and (x[~real] == 0).all()
        seen += y[real].tolist()
    assert seen == list(range(1, tokens))[:limit]
