import torch

from deeploop.config import ModelConfig
from deeploop.model.looplm import LoopLM
from deeploop.train.metrics import record_loop_rms, rms


def test_the_residual_of_a_loop_is_that_after_its_last_visit():
    torch.manual_seed(0)
    model = LoopLM(
        ModelConfig(residual="pre_norm", d_model=16, n_layers=2, loops=3, n_heads=2, vocab_size=11)
    )
    tokens = torch.arange(8)[None]
    by_loop, by_visit = [], []
    model(tokens, on_visit=record_loop_rms(by_loop))
    model(tokens, on_visit=lambda visit, h: by_visit.append(rms(h)))
    assert by_loop == by_visit[3::4] and len(set(by_visit)) == 12
