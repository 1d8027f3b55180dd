import dataclasses
import math

import pytest
import torch

from deeploop.config import ModelConfig
from deeploop.data.corpus import load_corpus
from deeploop.eval.validate import bits_per_byte, validate
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.utils.device import autocast
from deeploop.utils.distributed import Ranks


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = ModelConfig(d_model=16, n_layers=1, loops=2, n_heads=2, vocab_size=256, seq_len=16)
    return LoopLM(config)


def test_validation_covers_every_target_once(model, corpus_file):
    corpus = load_corpus(str(corpus_file))
    total = 0.0
    tokens = torch.from_numpy(corpus.val.read(0, len(corpus.val)))
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            x, y = tokens[start : start + 16], tokens[start + 1 : start + 17]
            logits = model.logits(model(x[None, : len(y)]))[0]
            total += torch.nn.functional.cross_entropy(logits, y, reduction="sum").item()
    expected = total / (len(tokens) - 1)
    for batch in (1, 3, 64):
        assert validate(model, corpus, batch, "fp32") == pytest.approx(expected, rel=1e-5)


def test_validation_keeps_no_graph(model, corpus_file):
    graphs = []
    model.embed_tokens.register_forward_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    validate(model, load_corpus(str(corpus_file)), 64, "fp32", tokens=16)
    assert graphs == [False]


@pytest.mark.parametrize("tokens", [1, 16, 300, 1001])
def test_the_first_targets_are_predicted_whatever_the_batch_and_the_ranks(
    model, corpus_file, tokens
):
    corpus = load_corpus(str(corpus_file))
    text = torch.from_numpy(corpus.val.read(0, tokens + 1))
    total = 0.0
    with torch.no_grad():
        for start in range(0, tokens, 16):
            x, y = text[start : start + 16], text[start + 1 : start + 17]
            logits = model.logits(model(x[None, : len(y)]))[0]
            total += torch.nn.functional.cross_entropy(logits, y, reduction="sum").item()
    for batch, world in ((1, 1), (3, 1), (16, 1), (4, 2), (3, 5)):
        shares = [
            validate(model, corpus, batch, "fp32", tokens, Share(rank, world))
            for rank in range(world)
        ]
        assert sum(shares) == pytest.approx(total / tokens, rel=1e-6)


class Share(Ranks):
    """A rank that adds up nothing: what it returns is its share of the mean."""

    def all_reduce_(self, tensors):
        pass

    def any_rank(self, flag):
        return flag


def test_a_limit_beyond_the_text_is_the_whole_text(model, corpus_file):
    corpus = load_corpus(str(corpus_file))
    whole = validate(model, corpus, 64, "fp32")
    assert validate(model, corpus, 64, "fp32", tokens=10**6) == whole
    assert validate(model, corpus, 64, "fp32", tokens=32) != pytest.approx(whole, rel=1e-5)


def test_a_validation_that_is_stopped_has_no_figure(model, corpus_file):
    corpus, done = load_corpus(str(corpus_file)), []

    def stop(targets):
        done.append(targets)
        return targets >= 96

    assert validate(model, corpus, 2, "fp32", tokens=300, stop=stop) is None
    assert done == [32, 64, 96] and model.training


def test_bits_per_byte_of_bytes_are_bits_per_token(corpus_file):
    corpus = load_corpus(str(corpus_file))
    assert bits_per_byte(math.log(2), corpus) == pytest.approx(1.0)
    wide = dataclasses.replace(corpus, val_bytes=3 * len(corpus.val))
    assert bits_per_byte(math.log(2), wide) == pytest.approx(1 / 3)


def test_the_bf16_error_of_a_shared_weights_gradient_does_not_grow_with_the_loops():
    """Each visit's gradient is rounded once; their sum must be kept in float32."""

    def error(loops):
        torch.manual_seed(0)
        model = LoopLM(
            ModelConfig(d_model=64, n_layers=1, loops=loops, n_heads=2, vocab_size=64, seq_len=32)
        )
        x, y = torch.randint(0, 64, (2, 4, 32))
        grads = []
        for precision in ("fp32", "bf16"):
            model.zero_grad()
            with autocast(torch.device("cpu"), precision):
                linear_cross_entropy(model(x), model.embed_tokens.weight, y).backward()
            grads.append(model.sublayers[1].branch.gate_up.weight.grad.clone())
        return ((grads[1] - grads[0]).norm() / grads[0].norm()).item()

    assert error(24) < 1.5 * error(1)
