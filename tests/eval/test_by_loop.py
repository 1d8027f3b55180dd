"""Figures after each loop are those of models that run so many loops, and of their definitions."""

import dataclasses
import math

import pytest
import torch

from deeploop.config import DataConfig
from deeploop.config.model import RESIDUALS
from deeploop.data.corpus import load_corpus
from deeploop.data.tasks.corpus import open_task
from deeploop.eval.by_loop import (
    LoopSums,
    leave,
    measure_by_loop,
    next_token_figures,
    relative_change,
)
from deeploop.eval.tasks import Matches
from deeploop.eval.validate import run_loops, validate, validate_after
from deeploop.model.depth.base import Depth
from deeploop.model.looplm import LoopLM
from tests.helpers.data import refused
from tests.helpers.plain_model import (
    plain_forward,
    plain_loop,
    plain_readout,
    plain_start,
    scattered,
)
from tests.model.test_borders import BORDERS, config_of, tokens

ROUTED = ("expert_choice", "token_choice")
EVERY = [
    *((residual, {"coda": coda}) for residual in RESIDUALS for coda in (0, 1)),
    *(("pre_norm", borders) for borders in BORDERS.values()),
    *((residual, {"depth": "act"}) for residual in ("post_norm", "loom")),
    *(("post_norm", {"depth": depth}) for depth in ROUTED),
    ("deeploop", {"depth": "fixed_point", "inject": "adapter", "coda": 1}),
    ("deeploop", {"depth": "gate", "loop_norm": "each"}),
    ("loom", {"moe": {"experts": 4, "top_k": 2, "d_expert": 8}}),
    ("loom", {"loom": {"carry": "normalised", "global_source": "readout"}}),
]


def made(residual="pre_norm", moe=None, loom=None, **fields):
    torch.manual_seed(0)
    m = config_of(residual, **fields)
    m = dataclasses.replace(
        m,
        moe=dataclasses.replace(m.moe, **moe or {}),
        loom=dataclasses.replace(m.loom, **loom or {}),
    )
    return scattered(LoopLM(m)).eval()


@pytest.fixture
def corpus(tmp_path):
    """A text of 20 letters, so that its ids are few."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 29 for i in range(3000)))
    loaded = load_corpus(str(path), "byte", val_fraction=0.2)
    return dataclasses.replace(loaded, vocab_size=31)


@pytest.mark.parametrize(("residual", "fields"), EVERY)
@torch.no_grad()
def test_the_state_after_t_of_more_loops_is_that_of_a_forward_of_t_loops(residual, fields):
    """Training has 3 loops: past them, constants and routers stay those of training."""
    model, read = made(residual, **fields), []

    def final(t, s):
        read.append((t, model.coda_output(model.after_loops(s), tokens())))

    run_loops(model, tokens(), 5, final)
    assert [t for t, _ in read] == [1, 2, 3, 4, 5]
    for t, n in read:
        torch.testing.assert_close(n, model(tokens(), loops=t), rtol=1e-12, atol=1e-12)


def test_a_rule_that_does_not_run_loop_by_loop_is_refused():
    class Jumps(Depth):
        def run(self, s, loops, run_loop, inputs, on_loop=None):
            return super().run(s, loops, run_loop, inputs)

    model = made()
    model.depth = Jumps(model.config)
    refused(lambda: run_loops(model, tokens(), 3, lambda t, s: None), "model.depth=fixed", "0")


def test_one_pass_has_the_losses_of_a_pass_for_each_number_of_loops(corpus, monkeypatch):
    model = made("deeploop")
    losses = validate_after(model, corpus, [4, 1, 3, 1], 3, "fp32", 200)
    assert list(losses) == [1, 3, 4]
    assert losses[3] == pytest.approx(validate(model, corpus, 3, "fp32", 200), rel=1e-12)
    forward = model.forward
    for loops in (1, 4):
        monkeypatch.setattr(model, "forward", lambda x, t=loops: forward(x, loops=t))
        assert losses[loops] == pytest.approx(validate(model, corpus, 5, "fp32", 200), rel=1e-12)


def plain_figures(model, corpus, loops, count):
    """Every figure from its definition, with the logits of all loops: by name [R, count]."""
    text = torch.from_numpy(corpus.val.read(0, count + 1))
    length, rows = model.config.seq_len, []
    for first in range(0, count, length):
        y = text[first + 1 : first + length + 1][: count - first]
        x = text[first : first + len(y)][None]
        e, s = plain_start(model, x)
        states = [s := plain_loop(model, s, e, t) for t in range(loops)]
        h = torch.stack([s.h[0] for s in states])
        logs = torch.stack([
            (plain_readout(model, s) @ model.head.T)[0].log_softmax(-1) for s in states
        ])  # fmt: skip
        p, best = logs.exp(), logs.argmax(-1)
        rows.append({
            "loss": -logs[:, torch.arange(len(y)), y],
            "right": (best == y).double(),
            "entropy": -(p * logs).sum(-1),
            "kl": (p[1:] * (logs[1:] - logs[:-1])).sum(-1),
            "switched": (best[1:] != best[:-1]).double(),
            "change": (h[1:] - h[:-1]).norm(dim=-1) / h[1:].norm(dim=-1),
        })  # fmt: skip
    return {name: torch.cat([row[name] for row in rows], 1) for name in rows[0]}


@pytest.mark.parametrize(("residual", "coda"), [("pre_norm", 0), ("loom", 1)])
@torch.no_grad()
def test_figures_are_their_definitions(corpus, residual, coda):
    model = made(residual, coda=coda)
    wanted = plain_figures(model, corpus, 5, count=38)  # the last of 3 sequences has 6 targets
    for batch in (2, 16):
        result = measure_by_loop(model, corpus, 5, batch, "fp32", 38)
        for name, values in wanted.items():
            means = values.mean(1).tolist()
            values = result[name][5 - len(means) :]
            assert values == pytest.approx(means, rel=1e-9), name
            assert all(map(math.isnan, result[name][: 5 - len(means)]))
    assert result["bits_per_byte"] == pytest.approx([x / math.log(2) for x in result["loss"]])
    check_exits(result["exits"], wanted)


@torch.no_grad()
def test_an_example_of_a_task_is_exact_where_all_its_answers_are_right():
    task = open_task(DataConfig(task="addition", difficulty="1", eval_difficulty="1"), 16)
    torch.manual_seed(0)
    config = dataclasses.replace(config_of(loops=2), vocab_size=task.vocab_size)
    model = LoopLM(config).eval()
    result = measure_by_loop(model, task, 3, 64, "fp32", 300)
    matches = Matches(model)
    validate(model, task, 50, "fp32", 300, observe=matches)
    exact, token = matches.shares()
    assert result["exact"][1] == pytest.approx(exact) and len(result["exact"]) == 3
    assert result["right"][1] == pytest.approx(token) and token > 0
    assert result["bits_per_byte"] is None


def check_exits(exits, figures):
    """Each token by itself: the first loop that the rule allows, else the last."""
    loops, count = figures["loss"].shape
    allowed = {
        "KL under 0.0005": lambda t, i: t > 1 and figures["kl"][t - 2, i] < 5e-4,
        "change under 0.03": lambda t, i: t > 1 and figures["change"][t - 2, i] < 0.03,
        "same token for 2 loops": lambda t, i: (
            t > 2 and not figures["switched"][t - 3 : t - 1, i].any()
        ),
    }
    assert [e["rule"] for e in exits] == list(allowed)
    for e in exits:
        rule = allowed[e["rule"]]
        left = [next((t for t in range(1, loops + 1) if rule(t, i)), loops) for i in range(count)]
        losses = [float(figures["loss"][t - 1, i]) for i, t in enumerate(left)]
        assert e["loops"] == pytest.approx(sum(left) / count)
        assert e["loss"] == pytest.approx(sum(losses) / count)
        assert e["left"] == pytest.approx(sum(t < loops for t in left) / count)


def test_a_token_leaves_at_the_first_loop_that_its_rule_allows():
    met = torch.tensor([[0, 0, 1], [0, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    loss = torch.arange(12.0).view(4, 3)
    loops, losses, early = leave(met, loss).tolist()
    assert (loops, losses, early) == (4 + 2 + 1, 9 + 4 + 2, 2)
    assert not met[-1].any()


@torch.no_grad()
def test_logits_are_made_in_chunks_and_padding_has_no_loss():
    torch.manual_seed(0)
    n, before = torch.randn(2, 2, 7, 8, dtype=torch.float64)
    head = torch.randn(31, 8, dtype=torch.float64)
    targets = torch.randint(0, 31, (2, 7))
    targets[1, 5:] = -100
    whole = next_token_figures(n, before, head, targets)
    for rows in (1, 4, 14, 99):
        for name, values in next_token_figures(n, before, head, targets, rows).items():
            torch.testing.assert_close(values, whole[name], rtol=1e-12, atol=1e-12)
    assert not whole["loss"][1, 5:].any() and whole["loss"][0].all()


def test_a_stream_of_zeros_does_not_change():
    zero, one = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    assert relative_change(zero, zero).item() == 0
    assert relative_change(one, zero).item() == 1
    assert relative_change(one, None).isnan().all()


@torch.no_grad()
def test_gate_exits_are_those_of_its_distribution(corpus):
    model = made("peri_norm", depth="gate", loop_norm="each")
    result = measure_by_loop(model, corpus, 4, 4, "fp32", 64)
    text = torch.from_numpy(corpus.val.read(0, 65))
    x, y = text[:64].view(4, 16), text[1:].view(4, 16)
    states = [plain_forward(model, x, t) for t in range(1, 5)]
    lam = [(n @ model.depth.gate.weight[0] + model.depth.gate.bias).sigmoid() for n in states]
    losses = [-(n @ model.head.T).log_softmax(-1).gather(-1, y[..., None])[..., 0] for n in states]
    stay, p = torch.ones_like(lam[0]), []
    for t in range(4):
        p.append(stay if t == 3 else stay * lam[t])
        stay = stay * (1 - lam[t])
    means = [x.mean().item() for x in p]
    assert result["gate"]["p"] == pytest.approx(means, rel=1e-9)
    assert result["gate"]["expected_loop"] == pytest.approx(
        sum(t * x for t, x in enumerate(means, 1))
    )
    expected = sum((a * b).mean().item() for a, b in zip(p, losses, strict=True))
    assert result["gate"]["expected_loss"] == pytest.approx(expected, rel=1e-9)
    for q in (0.5, 0.7, 0.9):
        (e,) = (e for e in result["exits"] if e["rule"] == f"gate, probability {q}")
        left = torch.stack(p).cumsum(0) >= q
        left[-1] = True
        first = left.int().argmax(0)
        assert e["loops"] == pytest.approx((first + 1).double().mean().item())
        at_exit = torch.stack(losses).gather(0, first[None]).mean().item()
        assert e["loss"] == pytest.approx(at_exit, rel=1e-9)


@torch.no_grad()
def test_loops_taken_are_a_histogram_over_targets(corpus, monkeypatch):
    model = made("post_norm", depth="act", loop_signal="add")
    taken = torch.arange(64.0).view(4, 16) % 3 + 1
    monkeypatch.setattr(model.depth, "loops_taken", lambda s: taken)
    result = measure_by_loop(model, corpus, 4, 4, "fp32", 62)["loops_taken"]  # 2 are padding
    assert result["shares"] == pytest.approx([0, 21 / 62, 21 / 62, 20 / 62, 0])
    assert result["mean"] == pytest.approx(taken.flatten()[:62].mean().item())


@torch.no_grad()
def test_act_says_the_loops_that_each_token_took(corpus):
    for bias, loops in ((30.0, 1), (-30.0, 4)):
        model = made("post_norm", depth="act", loop_signal="add")
        model.depth.halt.weight.data.zero_()
        model.depth.halt.bias.data.fill_(bias)
        assert measure_by_loop(model, corpus, 4, 4, "fp32", 62)["loops_taken"]["mean"] == loops


@torch.no_grad()
def test_figures_in_bfloat16_are_near_those_in_float32(corpus):
    torch.manual_seed(0)
    model = LoopLM(config_of("deeploop", depth="gate", coda=1)).eval()
    one, other = (measure_by_loop(model, corpus, 4, 4, p, 60) for p in ("fp32", "bf16"))
    for name in ("loss", "entropy"):
        assert other[name] == pytest.approx(one[name], rel=0.01) and other[name] != one[name]
    assert other["change"][1:] == pytest.approx(one["change"][1:], rel=0.05)
    assert other["gate"]["p"] == pytest.approx(one["gate"]["p"], abs=0.01)


@torch.no_grad()
@pytest.mark.parametrize("depth", ROUTED)
@pytest.mark.parametrize("loops", [1, 2, 3, 5])
def test_routed_tokens_take_as_many_loops_as_they_take_part_in(depth, loops):
    model, x = made("post_norm", depth=depth), tokens()
    s = run_loops(model, x, loops, lambda t, s: None)
    taken = model.depth.loops_taken(s)
    shares = torch.stack([(taken >= t).float().mean() for t in range(1, loops + 1)])
    torch.testing.assert_close(shares, model.depth.figures(s)["loop_shares"].float())
    assert taken.max() <= loops and (loops == 1 or len(taken.unique()) > 1)


@torch.no_grad()
def test_a_solver_says_its_evaluations():
    model, x = made("deeploop", depth="fixed_point", inject="adapter"), tokens()
    s = run_loops(model, x, 4, lambda t, s: None)
    assert (model.depth.loops_taken(s) == s.depth.evaluations).all()


def test_sums_do_not_depend_on_the_split_into_batches(corpus):
    model = made("deeploop")
    whole, parts = LoopSums(model, 3), LoopSums(model, 3)
    x, y = tokens(4, 16), tokens(4, 16).roll(1)
    with torch.no_grad():
        whole.add(x, y)
        for i in range(4):
            parts.add(x[i : i + 1], y[i : i + 1])
    for made_of, one in ((parts.by_loop, whole.by_loop), (parts.exits, whole.exits)):
        for name, value in one.items():
            torch.testing.assert_close(made_of[name], value, equal_nan=True)
