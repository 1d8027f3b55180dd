"""Draw noise and other numbers as pure functions of their place.

Each number of the noise that a looped state starts from depends on the sequence's key, the position
and the channel alone, by a hash and not by a generator's state: ranks, micro-batches, a resumed run
and a cache that receives the tokens by pieces all draw the same.

Source: Huginn, arXiv 2502.05171 (a truncated normal, cut at three standard deviations).
"""

import math

import torch
from torch import Tensor

BOUND = 3.0  # standard deviations
MASK = 2**63 - 1


def sequence_keys(seed: int, step: int, rows: range) -> Tensor:
    """Return a key for each sequence of a batch: int64 [len(rows)].

    Args:
        seed: of the run.
        step: of the run, counted from 0.
        rows: indices of the sequences in the global batch.
    """
    base = torch.tensor([(seed * 0x632BE59B + step) & MASK], dtype=torch.int64)
    return _mix(_mix(base) + torch.arange(rows.start, rows.stop))


def truncated_normal(keys: Tensor, positions: range, width: int, std: float) -> Tensor:
    """Draw noise: float32 [B, T, width], normal with deviation `std`, cut at 3 deviations.

    Args:
        keys: int64 [B], one of each sequence (`sequence_keys`); its device is the result's.
        positions: the T positions of the tokens in their sequence.
        width: numbers per position.
        std: of the normal before it is cut.
    """
    device = keys.device
    row = _mix(keys[:, None] + torch.arange(positions.start, positions.stop, device=device))
    bits = _mix(row[:, :, None] + torch.arange(width, device=device))
    uniform = ((bits & 0xFFFFFF).float() + 0.5) / 2**24
    edge = math.erf(BOUND / math.sqrt(2))
    return torch.erfinv((2 * uniform - 1) * edge) * (std * math.sqrt(2))


def uniforms(seed: int, numbers: Tensor, count: int) -> Tensor:
    """Draw `count` uniform numbers from (0, 1) for each number: float64 [..., count].

    Args:
        seed: of the run.
        numbers: int64 [...], such as those of a run's examples; its device is the result's.
        count: how many for each.
    """
    key = _mix(_mix(numbers + (seed & MASK)) + (seed * 0x632BE59B & MASK))
    bits = _mix(key[..., None] + torch.arange(count, device=numbers.device))
    return (_shift(bits, 11).double() + 0.5) / 2**53


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values: the finalizer of SplitMix64, with products modulo 2^64."""
    x = x + -0x61C8864680B583EB
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
