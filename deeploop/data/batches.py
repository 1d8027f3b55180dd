"""Which tokens are read when: the training order, validation and its n-gram floors.

The training order is a pure function of (seed, step, position in the global
batch). There is no loader state: any split of a batch over ranks or micro-batches
reads the same sequences, and a resumed run goes on with the very next one.
"""

from collections.abc import Iterator

import numpy as np
import torch

from deeploop.data.shards import TokenStream
from deeploop.utils.errors import InputError

IGNORE = -100  # a target that no loss counts: F.cross_entropy's ignore_index
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def windows_per_epoch(tokens: int, seq_len: int) -> int:
    """Training windows in one pass over ``tokens`` tokens.

    One fewer than would fit, where more than one does: that leaves room to begin
    each epoch at another phase, so that no window is seen twice in the same cut.
    """
    if tokens < seq_len + 1:
        raise InputError(
            f"the training split has {tokens} tokens, fewer than one sequence of seq_len + 1 = "
            f"{seq_len + 1}; give more text or a smaller seq_len"
        )
    return max(1, (tokens - 1) // seq_len - 1)


def train_starts(
    tokens: int, *, seed: int, step: int, global_batch: int, seq_len: int, rows: slice | range
) -> np.ndarray:
    """Where each row's window of seq_len + 1 tokens begins; int64 [rows].

    Sample step * global_batch + row lies in epoch sample // n, where a keyed
    bijection of [0, n) picks its window: without replacement, in O(rows) memory.
    """
    picked = range(global_batch)[rows] if isinstance(rows, slice) else rows
    if picked and not (min(picked) >= 0 and max(picked) < global_batch):
        raise IndexError(f"rows {rows} of a global batch of {global_batch}")
    count = windows_per_epoch(tokens, seq_len)
    first = step * global_batch
    samples = [divmod(first + row, count) for row in picked]
    epoch = np.array([e for e, _ in samples], np.uint64)
    index = np.array([i for _, i in samples], np.uint64)
    key = _mix(_mix(np.full_like(epoch, seed % (1 << 64)) + _GOLDEN) ^ epoch)
    slack = tokens - 1 - count * seq_len
    phase = _mix(key ^ _GOLDEN) % np.uint64(slack + 1)
    return (permute(index, count, key) * np.uint64(seq_len) + phase).astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function: a bijection of 64 bits that scatters them; uint64 [...]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, count: int, key: np.ndarray) -> np.ndarray:
    """Where a shuffle of [0, count) sends ``index``; uint64 [n], with a key for each.

    For any key a bijection: a Feistel network permutes the next power of four, and
    results >= count walk on along their cycle until they fall below it (fewer than
    four rounds on average).
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    rounds = _mix(key + np.arange(1, 7, dtype=np.uint64)[:, None])
    out = index.copy()
    walking = np.arange(len(index))
    while len(walking):
        left, right = out[walking] >> half, out[walking] & mask
        for round_key in rounds[:, walking]:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= count]
    return out


def train_batch(
    stream: TokenStream,
    *,
    seed: int,
    step: int,
    global_batch: int,
    seq_len: int,
    rows: slice | range,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``rows`` of the global batch of ``step``: (inputs, targets), int64 [rows, seq_len].

    A pure function of its arguments. Raises InputError where the stream is shorter
    than one sequence or holds an id outside its vocabulary.
    """
    starts = train_starts(
        len(stream), seed=seed, step=step, global_batch=global_batch, seq_len=seq_len, rows=rows
    )
    windows = np.empty((len(starts), seq_len + 1), np.int64)
    for row, start in zip(windows, starts, strict=True):
        row[:] = stream.read(int(start), seq_len + 1)
    whole = torch.from_numpy(windows)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def val_batches(
    stream: TokenStream, *, batch: int, seq_len: int, max_batches: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows in order, without overlap: (inputs, targets), int64 [<= batch, seq_len].

    Every token but the first is a target exactly once. The last window is padded
    with input 0 and target IGNORE, the last batch has fewer rows; none is empty.
    """
    targets = len(stream) - 1
    stop = targets if max_batches is None else min(targets, max_batches * batch * seq_len)
    for start in range(0, stop, batch * seq_len):
        length = min(batch * seq_len, targets - start)
        tokens = stream.read(start, length + 1)
        shape = (-(-length // seq_len), seq_len)
        inputs, wanted = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        inputs.ravel()[:length] = tokens[:-1]
        wanted.ravel()[:length] = tokens[1:]
        yield torch.from_numpy(inputs), torch.from_numpy(wanted)
