"""Tensors are grouped into messages, rows of a batch shared out, and ranks join or say why not."""

import socket

import pytest
import torch

from deeploop.utils.distributed import BUCKET_BYTES, Ranks, buckets, init_distributed
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


def test_a_port_in_use_is_one_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {
            "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        expected = rf"MASTER_PORT, 127\.0\.0\.1:{port}: rank 0 cannot join the 2 ranks"
        with pytest.raises(InputError, match=expected) as refusal, init_distributed():
            pass
        assert "\n" not in str(refusal.value)
