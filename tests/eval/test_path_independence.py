"""End states from several starts: equal where they must be, and compared by the definitions."""

import dataclasses

import pytest
import torch

from deeploop.data.corpus import load_corpus
from deeploop.eval.path_independence import (
    ends,
    exchanged_starts,
    measure_starts,
    noise_starts,
)
from deeploop.model.looplm import LoopLM
from deeploop.model.noise import sequence_keys
from deeploop.model.state import LoopState
from tests.helpers.data import refused
from tests.helpers.plain_model import plain_loop, plain_readout, plain_start, scattered
from tests.model.test_borders import config_of

HUGINN = {"start": "noise", "inject": "adapter", "loop_norm": "last", "prelude": 1, "coda": 1}


def made(residual="deepnorm", **fields):
    torch.manual_seed(0)
    return scattered(LoopLM(config_of(residual, **fields))).eval()


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 29 for i in range(3000)))
    loaded = load_corpus(str(path), "byte", val_fraction=0.2)
    return dataclasses.replace(loaded, vocab_size=31)


def measure(model, corpus, loops=(1, 2, 3), starts=3, batch=4, tokens=60):
    return measure_starts(model, corpus, loops, starts, batch, "fp32", tokens)


def inputs_of(corpus):
    """Four sequences of which the last has 4 tokens of padding, and their targets."""
    text = torch.from_numpy(corpus.val.read(0, 65))
    x, y = text[:64].view(4, 16).clone(), text[1:].view(4, 16)
    x[3, 12:] = 0
    return x, y


def check(result, model, reached, corpus):
    """Compare figures with those of plain states by start and loop; 4 targets are padding."""
    y, pairs = inputs_of(corpus)[1], [(0, j) for j in range(1, len(reached))]
    assert result["loops"] == [1, 2, 3]
    for i in range(3):
        h = [end[i].h.flatten(0, 1)[:60] for end in reached]
        cosines = [(h[a] * h[b]).sum(-1) / h[a].norm(dim=-1) / h[b].norm(dim=-1) for a, b in pairs]
        distances = [
            2 * (h[a] - h[b]).norm(dim=-1) / (h[a].norm(dim=-1) + h[b].norm(dim=-1))
            for a, b in pairs
        ]
        losses = [
            -(plain_readout(model, end[i]) @ model.head.T)
            .log_softmax(-1).gather(-1, y[..., None]).flatten()[:60].mean().item()
            for end in reached
        ]  # fmt: skip
        wanted = torch.stack(cosines).mean().item(), torch.stack(distances).mean().item()
        assert (result["cosine"][i], result["distance"][i]) == pytest.approx(wanted, rel=1e-9)
        assert result["loss_spread"][i] == pytest.approx(max(losses) - min(losses), rel=1e-6)


@torch.no_grad()
def test_noise_is_drawn_anew_for_each_start(corpus):
    model, reached = made(**HUGINN), []
    x, _ = inputs_of(corpus)
    for j in range(3):
        e, s = plain_start(model, x, sequence_keys(0, j, range(4)))
        states = [s := plain_loop(model, s, e, t) for t in range(3)]
        reached.append(states)
    check(measure(model, corpus), model, reached, corpus)


@torch.no_grad()
@pytest.mark.parametrize(("residual", "fields"), [("peri_norm", {"inject": "add"}), ("loom", {})])
def test_a_sequence_goes_on_from_the_end_states_of_others(corpus, residual, fields):
    """The input stays its own; LOOM's averages start anew."""
    model = made(residual, **fields)
    x, _ = inputs_of(corpus)
    e, s = plain_start(model, x)
    states = [s := plain_loop(model, s, e, t) for t in range(3)]
    reached = [states]
    for j in (1, 2):
        s = LoopState(states[2].h.roll(j, 0))
        reached.append([s := plain_loop(model, s, e, t) for t in range(3)])
    check(measure(model, corpus), model, reached, corpus)


@torch.no_grad()
def test_loops_that_forget_their_start_are_path_independent(corpus):
    """An adapter that reads the input alone leaves no trace of the state before."""
    for fields in (HUGINN, {"inject": "adapter"}):
        model = made(**fields)
        model.borders.injection.linear.weight[:, :16] = 0
        result = measure(model, corpus, loops=(2, 4))
        assert result["cosine"] == pytest.approx([1, 1])
        assert result["distance"] == pytest.approx([0, 0], abs=1e-9)
        assert result["loss_spread"] == pytest.approx([0, 0], abs=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("depth", ["act", "fixed_point", "expert_choice", "token_choice"])
def test_tokens_run_anew_from_another_state_under_every_depth_rule(corpus, depth):
    model = made("post_norm", depth=depth, inject="adapter")
    x, _ = inputs_of(corpus)
    _, other = exchanged_starts(model, x, 3, 2)
    (after,), _ = ends(model, x, torch.ones_like(x), [1], other)
    assert (after - other.state.h.flatten(0, 1)).norm(dim=-1).min() > 0.01


@torch.no_grad()
def test_no_two_starts_are_equal(corpus):
    x, _ = inputs_of(corpus)
    for model, make in ((made(**HUGINN), noise_starts), (made(inject="add"), exchanged_starts)):
        states = [
            ends(model, x, torch.ones_like(x), [1], start)[0][0] for start in make(model, x, 3, 4)
        ]
        flat = torch.stack([h.flatten() for h in states])
        assert torch.cdist(flat, flat).fill_diagonal_(1).min() > 0.1


def test_a_start_of_zeros_is_exchanged_for_end_states(corpus):
    """Its noise would be the same in every draw."""
    result = measure(made(start="noise", start_std=0.0, inject="add"), corpus, loops=(2, 3))
    assert min(result["distance"]) > 1e-3


def test_models_and_batches_without_other_starts_are_refused(corpus):
    refused(lambda: measure(made(), corpus), "starts=3", "model.inject")
    refused(lambda: measure(made(inject="add"), corpus, starts=1), "starts=1", "at least 2")
    refused(lambda: measure(made(inject="add"), corpus, loops=(1,)), "2 loops")
    refused(lambda: measure(made(inject="add"), corpus, batch=2), "starts=3", "the batch has 2")
