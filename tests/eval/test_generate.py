import copy
import os

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from deeploop.config import ModelConfig
from deeploop.eval.generate import cut_after_stop, generate, sample
from deeploop.model.looplm import LoopLM
from deeploop.train.setup import open_run
from deeploop.utils.errors import Diverged, InputError
from tests.helpers.data import refused


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = ModelConfig(d_model=16, n_layers=2, loops=3, n_heads=2, vocab_size=23, seq_len=12)
    return LoopLM(config).double()


def prompts(batch=2, length=5):
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(3))


def test_greedy_equals_recomputing_every_prefix(model):
    out = sample(model, prompts(), 7, temperature=0)
    tokens = prompts()
    for _ in range(7):
        fresh = model.logits(model(tokens)[:, -1]).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, fresh), 1)
    assert torch.equal(out, tokens)


def test_past_the_window_the_newest_half_is_read_again(model):
    out = sample(model, prompts(), 40, temperature=0)
    assert out.shape == (2, 45) and torch.equal(out[:, :5], prompts())
    # Token 12 is the first that does not fit; from there the window is the last 6.
    expected = model.logits(model(out[:, 6:12])[:, -1]).argmax(-1)
    assert torch.equal(out[:, 12], model.logits(model(out[:, :12])[:, -1]).argmax(-1))
    assert torch.equal(out[:, 13], model.logits(model(out[:, 7:13])[:, -1]).argmax(-1))
    assert expected.shape == (2,)


def test_a_prompt_longer_than_the_window(model):
    out = sample(model, prompts(length=30), 3, temperature=0)
    assert out.shape == (2, 33)
    first = model.logits(model(out[:, 18:30])[:, -1]).argmax(-1)
    assert torch.equal(out[:, 30], first)


def test_the_same_seed_draws_the_same_and_another_does_not(model):
    a, b, c = (sample(model, prompts(), 20, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_top_k_1_is_greedy(model):
    assert torch.equal(
        sample(model, prompts(), 9, top_k=1), sample(model, prompts(), 9, temperature=0)
    )


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e30, float("inf")])
def test_extreme_temperatures_are_greedy_or_uniform(model, temperature):
    out = sample(model, prompts(), 9, temperature=temperature)
    if temperature < 1:
        assert torch.equal(out, sample(model, prompts(), 9, temperature=0))


def test_other_loop_counts(model):
    outs = [sample(model, prompts(), 7, temperature=0, loops=loops) for loops in (1, 3, 6)]
    assert torch.equal(outs[1], sample(model, prompts(), 7, temperature=0))
    assert outs[0].shape == outs[2].shape == (2, 12)


def test_stops_when_every_row_has_ended(model):
    greedy = sample(model, prompts(1), 7, temperature=0)
    stop = int(greedy[0, 6])
    assert sample(model, prompts(1), 7, temperature=0, stop=stop).shape[1] <= 7


def test_a_row_ends_at_its_own_end_of_text():
    assert cut_after_stop([5, 9, 1, 2, 9, 3], start=2, stop=9) == [5, 9, 1, 2]
    assert cut_after_stop([5, 9, 1, 2], start=2, stop=9) == [5, 9, 1, 2]


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(InputError, match="prompt"):
        sample(model, prompts()[:, :0], 3)


def test_generate_from_a_run_and_from_a_checkpoint(config, quiet, tmp_path):
    open_run(config, quiet).fit()
    run = tmp_path / "run"
    texts = generate(str(run), "the quick", tokens=20, num_samples=2, device="cpu")
    assert len(texts) == 2 and all(t.startswith("the quick") for t in texts)
    again = generate(
        str(run / "checkpoints" / "step_000020"),
        "the quick",
        tokens=20,
        device="cpu",
        num_samples=2,
    )
    assert texts == again
    (tmp_path / "prompt.txt").write_text("the quick")
    assert (
        generate(
            str(run), f"FILE:{tmp_path / 'prompt.txt'}", tokens=20, num_samples=2, device="cpu"
        )
        == texts
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 0), ("num_samples", 0), ("loops", -1), ("temperature", -0.5), ("top_k", -1),
     ("temperature", float("nan")), ("prompt", "FILE:/nowhere"), ("prompt", ""),
     ("run", "/nowhere"), ("device", "tpu")],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(config, quiet, name, value):
    trainer = open_run(config, quiet)
    trainer.save()
    good = {"run": config.train.out, "prompt": "a", "device": "cpu"}
    with pytest.raises(InputError, match=name) as refused:
        generate(**{**good, name: value})
    assert "\n" not in str(refused.value)


def test_compiled_branches_are_not_compiled_again_for_every_slot_and_length():
    torch.manual_seed(0)
    config = ModelConfig(d_model=16, n_layers=1, loops=2, n_heads=2, vocab_size=23, seq_len=12)
    model, counter = LoopLM(config), CompileCounter()
    for sublayer in model.sublayers:
        sublayer.branch.compile(backend=counter)
    sample(model, prompts(), 3)
    assert counter.frame_count == 0
    model(prompts())
    assert counter.frame_count > 0


def test_a_prompt_comes_from_a_regular_file_of_text(tmp_path):
    pipe, latin = tmp_path / "pipe", tmp_path / "latin.txt"
    os.mkfifo(pipe)
    latin.write_bytes(b"\xe9t\xe9")
    refused(lambda: generate(str(tmp_path), f"FILE:{pipe}"), pipe, "a named pipe")
    refused(lambda: generate(str(tmp_path), f"FILE:{latin}"), latin, "UTF-8")


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_is_drawn_from_logits_that_are_not_finite(model, temperature, value):
    bad = copy.deepcopy(model)
    bad.logits = lambda n: torch.full((len(n), 23), value)
    with pytest.raises(Diverged, match="not finite"):
        sample(bad, prompts(), 3, temperature=temperature)
