"""Models without loops as looped ones: exact with full rank, near with less, refused where not."""

import dataclasses
import itertools

import pytest
import torch

from deeploop.config import ModelConfig, MoEConfig
from deeploop.model.convert.recursion import INITS, looped_from, stepwise, truncated
from deeploop.model.looplm import LoopLM, count_parameters
from tests.helpers.data import refused
from tests.helpers.plain_model import scattered


def small(**changes) -> ModelConfig:
    base = ModelConfig(
        residual="pre_norm", d_model=16, n_layers=4, loops=1, n_heads=2, vocab_size=31, seq_len=12
    )
    return dataclasses.replace(base, **changes)


def parent(**changes) -> LoopLM:
    """A float64 model without loops, some of its gains zero or below."""
    torch.manual_seed(0)
    model = scattered(LoopLM(small(**changes)))
    for sublayer in model.sublayers:
        if sublayer.gain_in is not None:
            sublayer.gain_in.data.normal_()
            sublayer.gain_in.data[3] = 0
    return model


def looped(model: LoopLM, *arguments) -> LoopLM:
    config, weights = looped_from(model.state_dict(), model.config, *arguments)
    made = LoopLM(config).double()
    made.cos, made.sin = model.cos, model.sin
    made.load_state_dict(weights)
    return made


def tokens():
    return torch.randint(0, 31, (3, 12), generator=torch.Generator().manual_seed(1))


def logits(model):
    x = tokens()
    return model.logits(model(x)).detach()


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(
    ("loops", "changes"),
    [
        (2, {}),
        (4, {"qk_norm": True, "d_ff": 10}),  # d_ff below d_model: adapters of less rank
        (3, {"n_layers": 6, "prelude": 1, "coda": 1, "loop_norm": "last"}),
    ],
)
def test_full_rank_gives_the_old_model_back(init, loops, changes):
    old = parent(**changes)
    new = looped(old, loops, init, 16)
    assert (new.config.n_layers, new.config.loops) == (old.config.n_layers // loops, loops)
    torch.testing.assert_close(logits(new), logits(old), rtol=0, atol=1e-10)


@pytest.mark.parametrize("init", INITS)
def test_more_rank_is_nearer_and_no_rank_shares_all(init):
    old = parent()
    far = [float((logits(looped(old, 2, init, r)) - logits(old)).norm()) for r in (0, 4, 12, 16)]
    assert far[0] > far[1] > far[2] > 100 * far[3]
    shared = looped(old, 2, init)
    assert not any("adapters" in name for name, _ in shared.named_parameters())
    assert count_parameters(shared) < count_parameters(old)


@pytest.mark.parametrize("init", ["average", "lower"])
def test_a_model_whose_blocks_repeat_is_looped_without_loss(init):
    old = parent()
    for i in range(4):
        old.sublayers[4 + i].load_state_dict(old.sublayers[i].state_dict())
    torch.testing.assert_close(logits(looped(old, 2, init)), logits(old), rtol=0, atol=1e-10)


def test_shared_blocks_start_as_the_blocks_that_an_init_names():
    old = parent(n_layers=6)
    matrices = [s.branch.out.weight for s in old.sublayers[::2]]
    folded = [s.branch.qkv.weight * s.gain_in for s in old.sublayers[::2]]
    expected = {
        "stepwise": [[0], [2], [5]],
        "average": [[0, 3], [1, 4], [2, 5]],
        "lower": [[0], [1], [2]],
    }
    for init, chosen in expected.items():
        new = looped(old, 2, init, 2)
        for sublayer, blocks in zip(new.sublayers[::2], chosen, strict=True):
            assert bool((sublayer.gain_in == 1).all())
            for weight, every in ((sublayer.branch.out, matrices), (sublayer.branch.qkv, folded)):
                mean = sum(every[i] for i in blocks) / len(blocks)
                torch.testing.assert_close(weight.weight, mean, rtol=0, atol=1e-12)


def test_stepwise_keeps_the_first_and_the_last_block():
    """As the paper's Gemma: 9 of 18."""
    for n_blocks, loops in ((9, 2), (2, 2), (6, 3), (2, 12)):
        chosen = [stepwise(b, n_blocks, loops)[0] for b in range(n_blocks)]
        assert chosen[0] == 0 and chosen[-1] == n_blocks * loops - 1
        steps = [b - a for a, b in itertools.pairwise(chosen)]
        assert max(steps) - min(steps) <= 1
    assert stepwise(0, 1, 4) == [0]


def test_a_truncated_residual_is_the_nearest_of_its_rank():
    """Eckart and Young: what is left has the norm of the singular values that are left out."""
    matrix = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = truncated(matrix, 2)
    assert (a.shape, b.shape) == ((2, 6), (9, 2))
    left_out = torch.linalg.svdvals(matrix)[2:].norm()
    torch.testing.assert_close((matrix - b @ a).norm(), left_out, rtol=1e-10, atol=0)
    torch.testing.assert_close(a @ a.T, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-12)


def test_weights_keep_their_dtype_and_the_old_ones_stay():
    old = parent().float()
    before = {name: w.clone() for name, w in old.state_dict().items()}
    _, weights = looped_from(old.state_dict(), old.config, 2, "average", 4)
    assert {w.dtype for w in weights.values()} == {torch.float32}
    weights["embed_tokens.weight"].zero_()
    assert all(torch.equal(w, before[name]) for name, w in old.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, (3,), ["loops=3", "4 blocks"]),
        ({}, (1,), ["loops=1", "2 or more"]),
        ({}, (0,), ["loops=0", "2 or more"]),
        ({"loops": 2}, (2,), ["model.loops=2", "loops already"]),
        ({}, (2, "best"), ["init='best'", "stepwise, average, lower"]),
        ({}, (2, "lower", -1), ["model.lora_rank=-1"]),
        ({}, (2, "lower", 17), ["model.lora_rank=17", "model.d_model=16"]),
        ({"lora_rank": 2}, (2,), ["model.lora_rank=2"]),
        ({"inject": "add"}, (2,), ["model.inject=add", "model.inject=none"]),
        ({"loop_norm": "each"}, (2,), ["model.loop_norm=each"]),
        ({"loop_signal": "add"}, (2,), ["model.loop_signal=add"]),
        ({"depth": "gate"}, (2,), ["model.depth=gate", "model.depth=fixed"]),
        ({"residual": "peri_norm"}, (2,), ["model.residual=peri_norm", "pre_norm"]),
        ({"residual": "post_norm"}, (2,), ["model.residual=post_norm"]),
        ({"residual": "deeploop"}, (2,), ["model.residual=deeploop"]),
        ({"residual": "loom"}, (2,), ["model.residual=loom"]),
        ({"moe": MoEConfig(experts=4, top_k=2)}, (2,), ["model.moe.experts=4"]),
    ],
)
def test_models_that_cannot_be_looped_are_refused(changes, arguments, words):
    refused(lambda: looped_from({}, small(**changes), *arguments), *words)
