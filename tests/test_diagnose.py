"""deeploop diagnose: what it measures, what it writes, what it refuses."""

import copy
import hashlib
import json
import math

import pytest
import torch

from deeploop import checkpoint, scaling
from deeploop.alignment import apart, gradients, gram, joint, norms, run_apart
from deeploop.cli import main
from deeploop.config import ModelConfig, MoEConfig
from deeploop.diagnose import (
    Batch,
    Measured,
    apart_mean,
    checkpoints,
    diagnose,
    measure,
    moments,
    peak,
    probe,
    update_size,
)
from deeploop.errors import InputError
from deeploop.lm import LoopLM
from deeploop.memory import Live
from deeploop.optim import adamw
from deeploop.start import open_run

EXPERTS = MoEConfig(experts=4, top_k=2, d_expert=16, shared=1)


@pytest.fixture
def trained(config, quiet):
    """A run with checkpoints at steps 10 and 20."""
    config = config.replace("train", eval_every=0)
    trainer = open_run(config, quiet)
    trainer.fit()
    return trainer


def files(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def test_a_run_is_diagnosed_as_it_began_and_at_each_checkpoint(trained, capsys):
    before = files(trained.folder)
    assert main(["diagnose", str(trained.folder), "--probes", "2"]) == 0
    said = capsys.readouterr().out
    for word in ("full backprop", "GiB", "kappa", "diagnose.png", "1 attention"):
        assert word in said
    found = json.loads((trained.folder / "diagnose.json").read_text())
    assert (found["loops"], found["sequences"], found["probes"]) == (2, 4, 2)
    assert [r["step"] for r in found["readings"]] == [0, 10, 20]
    for r in found["readings"]:
        check_reading(r, loops=2, sublayers=2)
    assert (trained.folder / "diagnose.png").read_bytes().startswith(b"\x89PNG")
    after = files(trained.folder)
    assert {p: after[p] for p in before} == before


def check_reading(r, loops, sublayers):
    assert 0 <= r["kappa"] <= r["kappa_directional"] <= loops + 1e-9
    assert r["gamma"] == pytest.approx(math.log(r["kappa"]) / math.log(loops))
    assert r["p"] == pytest.approx((1 + r["gamma"]) / 4)
    assert max(b["kappa"] for b in r["branches"]) == r["kappa"]
    assert [b["kappa"] for b in r["branches"] if b["sublayer"] == r["sublayer"]] == [r["kappa"]]
    assert len(r["kappa_by_probe"]) == 2
    assert len(r["rms"]) == loops and len(r["rms"][0]) == sublayers
    assert 0 < r["update"]["measured"] <= r["update"]["bound"] <= r["update"]["bound_untied"]
    assert r["update"]["random"] < r["update"]["bound"]
    assert r["budget"]["measured"] <= r["budget"]["aligned"] * (1 + 1e-9)


def test_a_preset_is_diagnosed_as_its_run_begins(trained, config, quiet, tmp_path):
    first = diagnose(trained.config, checkpoints(str(trained.folder)), quiet)[0]
    fresh = diagnose(config.replace("train", out=str(tmp_path / "new")), [], quiet)
    assert fresh == [first]
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"diagnose.json", "diagnose.png"}


def test_a_checkpoint_alone(trained):
    path = trained.folder / "checkpoints" / "step_000010"
    assert [found.step for found in checkpoints(str(path))] == [10]
    assert [found.step for found in checkpoints(str(trained.folder))] == [10, 20]


@pytest.mark.parametrize("moe", [MoEConfig(), EXPERTS])
@pytest.mark.parametrize("after", [0, 10])
def test_the_step_is_the_runs_own(config, quiet, moe, after):
    """On the trainer's batch the shared weights become what the trainer makes of them."""
    config = config.replace("model", moe=moe)
    config = config.replace("train", steps=after or 20, eval_every=0)
    trainer = open_run(config, quiet)
    if after:
        trainer.fit()
    # More steps than it has done, so that there is a next learning rate.
    trainer.config = config = trainer.config.replace("train", steps=20)
    model = LoopLM(config.model)
    model.load_state_dict(trainer.model.state_dict())
    optimizer = adamw(model, config.train)
    optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    before = [p.detach().clone() for p in model.parameters()]
    start = model.embedding.weight.detach().clone()
    measured = measure(model, optimizer, config, after, Batch(*trainer.batch(), 1, 0))
    trainer.step(watch=False)
    routers = {id(p) for s in model.sublayers for p in getattr(s.branch, "routers", ())}
    shared = {id(p) for s in model.sublayers for p in s.parameters()} - routers
    moved = 0.0
    for ours, theirs, old in zip(
        model.parameters(), trainer.model.parameters(), before, strict=True
    ):
        assert not torch.equal(theirs, old)
        wanted = theirs if id(ours) in shared else old
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)
        moved += (ours.detach() - old).double().square().sum().item()
    assert torch.equal(model.embedding.weight, start)
    assert float(measured.steps.square().sum()) == pytest.approx(moved, rel=1e-5)


def test_experts_loads_and_overlap_are_by_loop(config, quiet, tmp_path):
    config = config.replace("model", arm="loom", loops=3, moe=EXPERTS)
    (r,) = diagnose(config.replace("train", out=str(tmp_path / "x"), plan="segments"), [], quiet)
    assert "(the run trains under segments)" in quiet.file.getvalue()
    loads = torch.tensor(r["loads"])
    assert loads.shape == (3, 1, 4) and (loads.sum(-1) == 4 * 16 * 2).all()
    assert len(r["router_overlap"]) == len(r["load_spread"]) == 3
    assert r["branches"][1]["sublayer"] == "1 MoE" and "budget" not in r


def test_one_loop_has_no_exponent(config, quiet, tmp_path):
    config = config.replace("model", loops=1).replace("train", out=str(tmp_path / "x"))
    (r,) = diagnose(config, [], quiet)
    assert r["gamma"] is r["p"] is r["cosine"] is None and 0 < r["kappa"] <= 1 + 1e-9


def test_probes_estimate_the_jacobian():
    """400 probes against all rows of it, to 10%, in units of the RMS of F."""
    torch.manual_seed(0)
    model = LoopLM(ModelConfig(d_model=8, n_heads=1, n_layers=1, loops=2, vocab_size=9))
    views = apart(model.double())
    n = run_apart(model, views.loops, torch.tensor([[3, 1, 4]])).n
    rows = torch.eye(n.numel(), dtype=n.dtype).view(-1, *n.shape)
    exact = sum(
        torch.stack([gram(v) for v in gradients(n, views.branches, weight=row)[0]]) for row in rows
    )
    found = sum(probe(n, views.branches, Batch(n, n, 400, 0))) / 400
    for of in (norms, joint):
        torch.testing.assert_close(of(found), of(exact / n.numel()), rtol=0.1, atol=0)


def test_what_the_update_is_held_against():
    """Two parts of norms |U| = (1, 1; together 2) and (3, 4; together 5), moved by 1/2 and 2."""
    u = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[9.0, 0.0], [0.0, 16.0]]]).double()
    nothing = torch.zeros(())
    steps, moved = torch.tensor([0.5, 2.0]).double(), torch.tensor(1.1)
    m = Measured(nothing, nothing, None, u, u[None], steps, [4, 25], moved)
    assert update_size(m, u, 0.1) == pytest.approx(
        {
            "lr": 0.1,
            "measured": 1.1,
            "bound": 2 * 0.5 + 5 * 2,
            "bound_untied": 2 * 0.5 + 7 * 2,
            "random": math.hypot(2 * 0.5 / 2, 5 * 2 / 5),
            "measured_over_bound": 0.1,
        }
    )


def test_moments_of_a_stream():
    h = torch.tensor([[[1.0, 3.0], [5.0, 3.0]]])
    rms, variance, between = moments(h).tolist()
    assert rms == pytest.approx(math.sqrt(44 / 4))
    assert variance == 1 and between == 2  # means of (1, 1), and of (4, 0)


def test_the_mean_cosine_leaves_the_diagonal_out():
    assert apart_mean(torch.tensor([[1.0, 0.5], [0.25, 1.0]])) == 0.375


@pytest.mark.parametrize("arm", ["deeploop", "loom"])
def test_memory_is_counted_without_allocating_it(config, arm):
    """What fake tensors say against what real ones take."""
    config = config.replace("model", arm=arm, vocab_size=31, moe=EXPERTS)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    with Live() as live:
        model = LoopLM(config.model)
        measure(model, adamw(model, config.train), config, 0, Batch(tokens, tokens, 1, 0))
    assert peak(config, 4) == pytest.approx(live.peak, rel=0.02)


def test_what_cannot_be_diagnosed_is_refused(trained, config, quiet, tmp_path):
    fresh = config.replace("train", out=str(tmp_path / "new"))
    with pytest.raises(InputError, match="probes=0: must be at least 1"):
        diagnose(fresh, [], quiet, probes=0)
    with pytest.raises(InputError, match="batch_size=-1: must be at least 0"):
        diagnose(fresh, [], quiet, batch_size=-1)
    with pytest.raises(InputError, match=r"held-out tokens are fewer than one sequence"):
        diagnose(fresh.replace("data", val_fraction=1e-3), [], quiet)
    with pytest.raises(InputError, match=r"model.loops=3: the checkpoint .* trained with 2"):
        diagnose(
            trained.config.replace("model", loops=3), [checkpoint.find(str(trained.folder))], quiet
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["nowhere"], ["deeploop-tiny", "--probes", "0"]])
def test_the_command_line_refuses_in_a_sentence(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", "--help"])
    assert stopped.value.code == 0 and "--probes" in capsys.readouterr().out


def test_budgets_are_those_of_the_rule(config, quiet, tmp_path):
    """2 blocks x 2 loops: 1/(8N) untied, 1/(8K) aligned."""
    config = config.replace("model", n_layers=2).replace("train", out=str(tmp_path / "x"))
    (r,) = diagnose(config, [], quiet)
    assert r["budget"]["untied"] == pytest.approx(1 / 32)
    assert r["budget"]["aligned"] == pytest.approx(1 / 16) == scaling.aligned_budget(2, 2, 0.5)
    assert r["budget"]["measured"] == pytest.approx(r["kappa"] / 32)
    largest = {key: max(x for b in r["branches"] for x in b[key]) for key in ("u", "g")}
    assert r["c_u"] == pytest.approx(largest["u"] * 16)  # beta/alpha = 1/(4N)
    assert r["c_g"] == pytest.approx(largest["g"] * 16)


def test_the_bounds_constants_do_not_change_with_the_loops(config, quiet, tmp_path):
    """As DeepLoop's rule has it: at the start |U| and |G| of a visit fall as beta/alpha."""
    found = []
    for loops in (2, 8):
        c = config.replace("model", loops=loops).replace("train", out=str(tmp_path / str(loops)))
        found += diagnose(c, [], quiet)
    for key in ("c_u", "c_g"):
        assert found[0][key] == pytest.approx(found[1][key], rel=0.05)
