"""Adapters of the loops: their equation, their start, and what they must leave alone."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

from deeploop.analyze.diagnose.per_loop import per_loop_model, run_per_loop
from deeploop.config import Config, ModelConfig, MoEConfig
from deeploop.model.flops import flops_per_token
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.model.memory import parameters
from deeploop.runs import checkpoint
from deeploop.train.describe import describe
from deeploop.train.setup import open_run
from deeploop.train.step import train_step
from deeploop.utils.errors import InputError
from tests.helpers.data import refused
from tests.helpers.plain_model import EPS, ROPE_BASE, plain_forward, scattered


def small(**changes) -> ModelConfig:
    base = ModelConfig(
        residual="pre_norm", d_model=24, n_layers=2, loops=3, n_heads=2, vocab_size=31,
        seq_len=16, norm_eps=EPS, rope_base=ROPE_BASE, lora_rank=4,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def build(**changes) -> LoopLM:
    """A float64 model whose gains and adapters all differ."""
    torch.manual_seed(0)
    model = scattered(LoopLM(small(**changes)))
    for name, p in model.named_parameters():
        if "adapters" in name:
            p.data.normal_(std=0.3)
    return model


def tokens(batch=2, length=16):
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(1))


def unrolled(model: LoopLM) -> LoopLM:
    """The model without loops in which every visit has a matrix W + B A of its own."""
    c = model.config
    k = 2 * c.n_layers
    plain = LoopLM(dataclasses.replace(c, loops=1, n_layers=c.n_layers * c.loops, lora_rank=0))
    plain = scattered(plain)
    state = {n: p for n, p in model.state_dict().items() if not n.startswith("sublayers")}
    for i in range(k * c.loops):
        loop, sublayer = i // k, model.sublayers[i % k]
        for name, p in sublayer.state_dict().items():
            if "adapters" not in name:
                state[f"sublayers.{i}.{name}"] = p.clone()
        for name, adapters in sublayer.adapters.items():
            added = adapters.b[loop] @ adapters.a[loop]
            state[f"sublayers.{i}.branch.{name}.weight"] += added
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize("changes", [
    {}, {"residual": "deeploop"}, {"residual": "peri_norm", "prelude": 1, "coda": 1},
    {"residual": "post_norm", "lora_rank": 24, "d_ff": 10},
])  # fmt: skip
def test_a_loop_adds_its_low_rank_matrix_to_the_shared_one(changes):
    """Values and gradients, by the chain rule from those of the matrices W + B A."""
    model = build(**changes)
    plain, x = unrolled(model), tokens()
    n, wanted = model(x), plain_forward(plain, x)
    torch.testing.assert_close(n, wanted, rtol=1e-10, atol=1e-10)
    direction = torch.randn(n.shape, dtype=n.dtype, generator=torch.Generator().manual_seed(2))
    for output in (n, wanted):
        (output * direction).sum().backward()
    k, loops = len(model.sublayers), model.config.loops
    for j, sublayer in enumerate(model.sublayers):
        assert len(sublayer.adapters) == 2
        for name, adapters in sublayer.adapters.items():
            visited = [plain.sublayers[j + k * t].branch for t in range(loops)]
            grads = [getattr(branch, name).weight.grad for branch in visited]
            torch.testing.assert_close(
                getattr(sublayer.branch, name).weight.grad, sum(grads), rtol=1e-7, atol=1e-8
            )
            for a, b, grad in zip(adapters.a, adapters.b, grads, strict=True):
                torch.testing.assert_close(a.grad, b.T @ grad, rtol=1e-7, atol=1e-8)
                torch.testing.assert_close(b.grad, grad @ a.T, rtol=1e-7, atol=1e-8)


def test_at_first_adapters_add_nothing_and_the_other_weights_are_those_without():
    models = []
    for rank in (0, 16):
        torch.manual_seed(3)
        models.append(LoopLM(small(d_model=128, lora_rank=rank)))
    without, model = models
    assert torch.equal(model(tokens()), without(tokens()))
    weights = model.state_dict()
    assert all(torch.equal(weights[name], p) for name, p in without.state_dict().items())
    for name, p in model.named_parameters():
        if ".adapters." in name and ".b." in name:
            assert not p.any(), name
        if ".adapters." in name and ".a." in name:
            assert p.std().item() == pytest.approx(p.shape[1] ** -0.5, rel=0.1), name


def test_only_looped_blocks_have_adapters_one_for_each_loop_and_of_no_more_than_full_rank():
    model = LoopLM(small(prelude=1, coda=1, lora_rank=24, d_ff=10))
    assert not any(s.adapters for s in (*model.prelude, *model.coda))
    attention, mlp = model.sublayers[:2]
    shapes = {
        name: [tuple(p.shape) for p in adapters.parameters()]
        for name, adapters in (*attention.adapters.items(), ("mlp out", mlp.adapters["out"]))
    }
    assert shapes == {
        "qkv": [(24, 24)] * 3 + [(72, 24)] * 3,
        "out": [(24, 24)] * 6,
        "mlp out": [(10, 10)] * 3 + [(24, 10)] * 3,
    }


def test_loops_past_the_last_adapter_take_that_one():
    model, x = build(), tokens()
    longer = build(loops=5)
    state = model.state_dict()
    for name in longer.state_dict():
        if "adapters" in name and name.endswith((".3", ".4")):
            state[name] = state[name[:-1] + "2"]
    longer.load_state_dict(state)
    assert torch.equal(model(x, loops=5), longer(x))
    assert not torch.equal(model(x, loops=5), model(x, loops=3))


@pytest.mark.parametrize("cuts", [[16], [5, 1, 1, 4, 5]])
def test_cache_on_equals_cache_off(cuts):
    model, x = build(), tokens()
    cache = model.new_cache(batch=2, max_len=16)
    parts = [model(part, cache=cache) for part in x.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=1e-9, atol=1e-9)


def gradients(model, **train):
    """Gradients of one step by name, None where there are none."""
    config = Config(model=model.config).replace(
        "train", batch_size=2, precision="fp32", clip=0.0, **train
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.zero_grad = lambda set_to_none: None
    x = tokens(length=17)
    train_step(model, optimizer, config, [(x[:, :-1], x[:, 1:])], 0.0)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["visit", "loop"])
def test_recomputing_changes_no_bit(recompute):
    kept, again = gradients(build()), gradients(build(), recompute=recompute)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_loops_without_gradient_leave_their_adapters_without():
    grads = gradients(build(), backprop="last", backprop_loops=2)
    assert sum("adapters" in name for name in grads) == 3 * 2 * 2 * 4
    for name, grad in grads.items():
        if name != "norm_embed.weight":  # the loops before the last k have no gradient
            assert (grad is None) == ("adapters" in name and name.endswith(".0")), name


def test_copies_for_each_loop_run_the_same_bits():
    model, x = build(), tokens()
    copies = per_loop_model(model).sublayers
    assert torch.equal(run_per_loop(model, copies, x)[1], model(x))


def test_bf16_autocast_stays_near_float32():
    model, x = build().float(), tokens()
    exact = model.logits(model(x))
    with torch.autocast("cpu", torch.bfloat16):
        n = model(x)
        low = model.logits(n).float()
    assert n.dtype == torch.bfloat16
    assert (low - exact).square().mean() / exact.square().mean() < 2e-3


def test_loop_counts_do_not_recompile():
    model, x = build().float(), tokens()
    torch._dynamo.reset()
    counter = CompileCounter()
    for sublayer in model.sublayers:
        sublayer.branch.forward = torch.compile(sublayer.branch.forward, backend=counter)
    model(x, loops=1)
    once = counter.frame_count
    for loops in (2, 3, 5):
        model(x, loops=loops)
    assert counter.frame_count == once


def test_parameters_and_flops_are_counted():
    model = LoopLM(small(lora_rank=5, d_ff=4))
    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert parameters(model.config) == count_parameters(model) - gains
    config = Config(model=model.config).replace("train", batch_size=2, precision="bf16")
    x = tokens(length=17)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with FlopCounterMode(display=False) as counter:
        train_step(model, optimizer, config, [(x[:, :-1], x[:, 1:])], 0.0)
    # In bfloat16 a CPU's attention is two plain products, which torch counts.
    assert counter.get_total_flops() / 32 == flops_per_token(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": -1}, ["model.lora_rank=-1", "0 or more"]),
        ({"lora_rank": 25}, ["model.lora_rank=25", "model.d_model=24"]),
        ({"moe": MoEConfig(experts=4, top_k=2)}, ["model.lora_rank=4", "model.moe.experts"]),
    ],
)
def test_ranks_that_cannot_be_are_refused(changes, words):
    refused(lambda: small(**changes), *words)


def test_sequences_of_other_loop_counts_do_not_share_a_loops_adapter(config, quiet):
    """They would take part in the same loops under other numbers."""
    drawn = config.replace("train", loop_count="poisson", loop_count_per="sequence")
    open_run(drawn, quiet)
    adapters = drawn.replace("model", lora_rank=2)
    refused(lambda: open_run(adapters, quiet), "train.loop_count_per=sequence", "model.lora_rank=2")


def test_a_run_trains_its_adapters_and_resumes_to_the_bit(config, quiet, tmp_path):
    config = config.replace("model", lora_rank=2).replace("train", steps=4, save_every=2)
    trainer = open_run(config, quiet)
    assert "LoRA rank 2 in each loop" in describe(trainer)[0]
    trainer.fit()
    assert all(b.any() for b in trainer.model.sublayers[0].adapters["qkv"].b)
    half = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000002"))
    again = open_run(config.replace("train", out=str(tmp_path / "fork")), quiet, half)
    again.fit()
    for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match=r"model\.lora_rank=3: the checkpoint"):
        open_run(config.replace("model", lora_rank=3), quiet, half)
