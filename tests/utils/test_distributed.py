"""Tensors are grouped into messages, and the rows of a batch are shared out."""

import pytest
import torch

from deeploop.utils.distributed import BUCKET_BYTES, Ranks, buckets
from deeploop.utils.errors import InputError


def test_a_sum_mixes_no_dtypes_and_keeps_messages_small():
    small = [torch.zeros(3), torch.zeros(4), torch.zeros(2, dtype=torch.int64), torch.zeros(1)]
    assert [len(b) for b in buckets(small)] == [2, 1, 1]
    big = [torch.empty(BUCKET_BYTES // 4, device="meta") for _ in range(3)]
    assert [len(b) for b in buckets(big)] == [1, 1, 1]
    assert list(buckets([])) == []


def test_rows_of_a_batch_are_shared_out():
    assert [list(Ranks(r, 3).local_rows(6)) for r in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(InputError, match=r"train\.batch_size=7.*multiple of the 3 ranks"):
        Ranks(0, 3).local_rows(7)
