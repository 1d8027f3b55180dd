"""Read batches of training and validation tokens from a stream.

The training order is a pure function of (seed, step, row of the global batch). There is
no loader state: any split of a batch over ranks or micro-batches reads the same
sequences, and a resumed run continues with the next one.
"""

from collections.abc import Iterator

import numpy as np
import torch

from deeploop.data.stream import TokenStream
from deeploop.utils.errors import InputError

IGNORE = -100  # target left out of the loss: the ignore_index of F.cross_entropy
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def windows_per_epoch(tokens: int, seq_len: int) -> int:
    """Return the number of training windows in one pass over ``tokens`` tokens.

    It is one fewer than would fit, where more than one does. The tokens left over allow
    each epoch to begin at another offset, so that windows differ between epochs.
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
    """Return the position of the first token of each row's window, int64 [rows].

    A window is seq_len + 1 tokens. Sample step * global_batch + row lies in epoch
    sample // n, where a keyed bijection of [0, n) picks its window: without replacement,
    in O(rows) memory.
    """
    picked = range(global_batch)[rows] if isinstance(rows, slice) else rows
    if picked and not (min(picked) >= 0 and max(picked) < global_batch):
        raise IndexError(f"rows {rows} of a global batch of {global_batch}")
    count = windows_per_epoch(tokens, seq_len)
    first = step * global_batch
    samples = [divmod(first + row, count) for row in picked]
    epoch = np.array([e for e, _ in samples], np.uint64)
    index = np.array([i for _, i in samples], np.uint64)
    key = mix(mix(np.full_like(epoch, seed % (1 << 64)) + _GOLDEN) ^ epoch)
    slack = tokens - 1 - count * seq_len
    phase = mix(key ^ _GOLDEN) % np.uint64(slack + 1)
    return (permute(index, count, key) * np.uint64(seq_len) + phase).astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers with the output function of splitmix64, a bijection; uint64 [...]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, count: int, key: np.ndarray) -> np.ndarray:
    """Map each ``index`` through a shuffle of [0, count) chosen by its key; uint64 [n].

    The map is a bijection for any key: a Feistel network permutes the next power of
    four, and is applied again to results >= count until they are below it (fewer than
    four times on average).
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    rounds = mix(key + np.arange(1, 7, dtype=np.uint64)[:, None])
    out = index.copy()
    active = np.arange(len(index))  # positions whose result is not below count yet
    while len(active):
        left, right = out[active] >> half, out[active] & mask
        for round_key in rounds[:, active]:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        out[active] = (left << half) | right
        active = active[out[active] >= count]
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
    """Read rows ``rows`` of the global batch of ``step``: (inputs, targets), int64 [rows, seq_len].

    A pure function of its arguments. Raises InputError where the stream is shorter
    than one window or has an id outside its vocabulary.
    """
    starts = train_starts(
        len(stream), seed=seed, step=step, global_batch=global_batch, seq_len=seq_len, rows=rows
    )
    windows = np.empty((len(starts), seq_len + 1), np.int64)
    for row, start in zip(windows, starts, strict=True):
        row[:] = stream.read(int(start), seq_len + 1)
    tokens = torch.from_numpy(windows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def val_batches(
    stream: TokenStream, *, batch: int, seq_len: int, targets: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Read windows in order, without overlap: (inputs, targets), int64 [<= batch, seq_len].

    Every token but the first is a target exactly once, or the first ``targets`` of them: the
    same windows whatever the batch. The last window is padded with input 0 and target IGNORE,
    the last batch has fewer rows; none is empty.
    """
    every = len(stream) - 1
    stop = every if targets is None else min(every, targets)
    for start in range(0, stop, batch * seq_len):
        length = min(batch * seq_len, stop - start)
        tokens = stream.read(start, length + 1)
        shape = (-(-length // seq_len), seq_len)
        inputs, padded = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        inputs.ravel()[:length] = tokens[:-1]
        padded.ravel()[:length] = tokens[1:]
        yield torch.from_numpy(inputs), torch.from_numpy(padded)
