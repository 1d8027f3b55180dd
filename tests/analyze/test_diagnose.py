"""deeploop diagnose: its figures, its files, the input that it refuses."""

import dataclasses
import hashlib
import io
import json
import math

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from deeploop.analyze import plots
from deeploop.analyze.diagnose.diagnose import (
    checkpoints,
    diagnose,
    draw_batch,
    float32_config,
    peak_bytes,
)
from deeploop.analyze.diagnose.diagnostics import Batch, measure_state
from deeploop.analyze.plan.memory import LiveBytes
from deeploop.cli import main
from deeploop.config import MoEConfig, scaling
from deeploop.data.corpus import load_corpus
from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.train.optim import make_optimizer
from deeploop.train.setup import open_run
from deeploop.utils.errors import Diverged, InputError

EXPERTS = MoEConfig(experts=4, top_k=2, d_expert=16, shared=1)


@pytest.fixture(autouse=True)
def uncounted(monkeypatch):
    """Print a constant as the peak memory, which takes as long to count as all other figures."""
    monkeypatch.setattr("deeploop.analyze.diagnose.diagnose.peak_bytes", lambda *_: 2**20)


@pytest.fixture
def trained(config, quiet):
    """A run with checkpoints at steps 10 and 20."""
    config = config.replace("train", eval_every=0)
    trainer = open_run(config, quiet)
    trainer.fit()
    return trainer


def files(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def test_a_run_is_diagnosed_at_initialisation_and_at_each_checkpoint(
    trained, capsys, pictures, monkeypatch
):
    monkeypatch.setattr("deeploop.analyze.diagnose.diagnose.peak_bytes", peak_bytes)
    before = files(trained.folder)
    assert main(["diagnose", str(trained.folder), "--probes", "2"]) == 0
    said = capsys.readouterr().out
    for word in (
        "full backprop",
        "iB (counted)",
        "kappa of directions",
        "diagnose.png",
        "1 attention",
    ):
        assert word in said
    results = json.loads((trained.folder / "diagnose.json").read_text())
    assert (results["loops"], results["sequences"], results["probes"]) == (2, 4, 2)
    assert [r["step"] for r in results["readings"]] == [0, 10, 20]
    for r in results["readings"]:
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


def test_a_preset_is_diagnosed_like_its_run_at_initialisation(trained, config, quiet, tmp_path):
    first = diagnose(trained.config, checkpoints(str(trained.folder)), quiet)[0]
    fresh = diagnose(config.replace("train", out=str(tmp_path / "new")), [], quiet)
    assert fresh == [first]
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"diagnose.json", "diagnose.png"}


def test_a_checkpoint_alone(trained):
    path = trained.folder / "checkpoints" / "step_000010"
    assert [ckpt.step for ckpt in checkpoints(str(path))] == [10]
    assert [ckpt.step for ckpt in checkpoints(str(trained.folder))] == [10, 20]


def test_experts_loads_and_overlap_are_by_loop(config, quiet, tmp_path):
    config = config.replace("model", residual="loom", loops=3, moe=EXPERTS)
    (r,) = diagnose(
        config.replace("train", out=str(tmp_path / "x"), backprop="segments"), [], quiet
    )
    assert "(the run trains under segments)" in quiet.file.getvalue()
    loads = torch.tensor(r["loads"])
    assert loads.shape == (3, 1, 4) and (loads.sum(-1) == 4 * 16 * 2).all()
    assert len(r["router_overlap"]) == len(r["load_spread"]) == 3
    assert r["branches"][1]["sublayer"] == "1 MoE" and "budget" not in r


def test_one_loop_has_no_exponent(config, quiet, tmp_path):
    config = config.replace("model", loops=1).replace("train", out=str(tmp_path / "x"))
    (r,) = diagnose(config, [], quiet)
    assert r["gamma"] is r["p"] is r["cosine"] is None and 0 < r["kappa"] <= 1 + 1e-9


@pytest.mark.parametrize("residual", ["deeploop", "loom"])
def test_memory_is_counted_without_allocating_it(config, residual):
    """Fake tensors against real ones."""
    config = config.replace("model", residual=residual, vocab_size=31, moe=EXPERTS)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    with LiveBytes() as live:
        model = LoopLM(config.model)
        measure_state(
            model, make_optimizer(model, config.train), config, 0, Batch(tokens, tokens, 1, 0)
        )
    assert peak_bytes(config, 4) == pytest.approx(live.peak, rel=0.02)


def test_impossible_diagnoses_are_refused(trained, config, quiet, tmp_path):
    fresh = config.replace("train", out=str(tmp_path / "new"))
    with pytest.raises(InputError, match="probes=0: must be at least 1"):
        diagnose(fresh, [], quiet, probes=0)
    with pytest.raises(InputError, match="sequences=-1: must be at least 0"):
        diagnose(fresh, [], quiet, sequences=-1)
    with pytest.raises(InputError, match=r"held-out tokens are fewer than one sequence"):
        diagnose(fresh.replace("data", val_fraction=1e-3), [], quiet)
    with pytest.raises(InputError, match=r"model.loops=3: the checkpoint .* trained with 2"):
        diagnose(
            trained.config.replace("model", loops=3), [checkpoint.find(str(trained.folder))], quiet
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere"], "neither a run's folder or checkpoint nor a preset"),
        (["deeploop-tiny", "--probes", "0"], "probes=0"),
        (["deeploop-tiny", "--draw", str(2**63)], f"draw={2**63}"),
        (["deeploop-tiny", "--draw", "-1"], "draw=-1"),
        (["deeploop-tiny", "--loops", "0"], "model.loops=0"),
    ],
)
def test_the_command_line_refuses_in_a_sentence(arguments, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *arguments]) == 2
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_ranks_are_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["diagnose", "deeploop-tiny"]) == 2
    assert "torchrun" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["file", "file/inside"])
def test_a_folder_that_cannot_be_is_refused_before_anything_is_computed(
    out, config, quiet, tmp_path
):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="could not be written"):
        diagnose(config.replace("train", out=str(tmp_path / out)), [], quiet)
    assert quiet.file.getvalue() == "" and (tmp_path / "file").read_text() == "kept"


def test_figures_that_are_not_finite_are_refused_and_not_written(config, quiet, tmp_path):
    """The norm of such an embedding overflows, and its gradient is not a number."""
    config = config.replace("model", embed_std=1e30).replace("train", out=str(tmp_path / "x"))
    with pytest.raises(Diverged, match="at step 0 is not finite"):
        diagnose(config, [], quiet)
    assert not (tmp_path / "x").exists()


def test_a_step_of_no_length_has_no_bound_to_reach(config, quiet, tmp_path):
    config = config.replace("train", lr=1e-30, out=str(tmp_path / "x"))
    (r,) = diagnose(config, [], quiet)
    assert r["update"]["bound"] == 0 and r["update"]["measured_over_bound"] is None


def test_a_batch_is_no_larger_than_the_held_out_text(config, quiet, tmp_path):
    """A run's own batch may be; no sequence is taken twice."""
    config = config.replace("train", batch_size=1000, micro_batch=0, out=str(tmp_path / "x"))
    config = config.replace("data", val_fraction=0.02)
    diagnose(config, [], quiet)
    most = json.loads((tmp_path / "x" / "diagnose.json").read_text())["sequences"]
    assert 1 < most < 1000
    with pytest.raises(InputError, match=f"sequences={most + 1}: there are {most} "):
        diagnose(config, [], quiet, sequences=most + 1)


def test_a_narrow_terminal_cuts_no_figure(config, tmp_path):
    console = Console(file=io.StringIO(), width=40)
    (r,) = diagnose(config.replace("train", out=str(tmp_path / "x")), [], console)
    said = console.file.getvalue()
    assert "\u2026" not in said and f"{r['update']['measured']:.1e}" in said


def test_p_is_given_for_rules_with_an_exponent_alone(config, quiet, tmp_path):
    config = config.replace("model", residual="pre_norm").replace("train", out=str(tmp_path / "x"))
    (r,) = diagnose(config, [], quiet)
    assert r["gamma"] is not None and r["p"] is None


@pytest.mark.parametrize(("loops", "n_layers"), [(1, 1), (2, 12)])
def test_the_picture_of_one_loop_and_of_many_blocks(
    loops, n_layers, config, quiet, tmp_path, pictures
):
    """Labels neither on top of each other nor past their panel."""
    config = config.replace("model", loops=loops, n_layers=n_layers)
    readings = diagnose(config.replace("train", out=str(tmp_path / "x")), [], quiet, probes=1)
    figure = Figure()
    kappa, norms = figure.subplots(2)
    plots._kappa(kappa, readings)
    plots._norms(norms, readings[-1]["branches"])
    heights = [text.xy[1] for text in kappa.texts]
    assert len(set(heights)) == len(heights) == min(loops, 2)
    assert [x.get_text() for x in norms.get_legend().get_texts()] == ["attention", "SwiGLU"]
    assert len(norms.get_lines()) == 2 * n_layers


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
    """DeepLoop's rule: at initialisation |U| and |G| of a visit fall as beta/alpha."""
    readings = []
    for loops in (2, 8):
        c = config.replace("model", loops=loops).replace("train", out=str(tmp_path / str(loops)))
        readings += diagnose(c, [], quiet)
    for key in ("c_u", "c_g"):
        assert readings[0][key] == pytest.approx(readings[1][key], rel=0.05)


def test_a_run_of_another_corpus_or_without_its_moments_is_refused(trained, quiet):
    ckpts = checkpoints(str(trained.folder))
    (ckpts[-1].path / "optimizer.pt").unlink()
    with pytest.raises(InputError, match=r"optimizer.pt: cannot be read"):
        diagnose(trained.config.replace("train", out=""), ckpts, quiet)
    with open(trained.config.data.path, "a") as file:
        file.write("more text\n" * 50)
    with pytest.raises(InputError, match="changed since the run"):
        diagnose(trained.config.replace("train", out=""), ckpts, quiet)


def test_a_diagnosis_is_in_float32_on_held_out_text(config):
    corpus = load_corpus(config.data.path, "byte", val_fraction=0.1)
    config = config.replace("train", precision="bf16", compile=True)
    config = float32_config(
        config.replace("model", moe=MoEConfig(experts=4, top_k=2, d_expert=16)), corpus
    )
    assert config.train.precision == "fp32" and not config.train.compile
    peer = float32_config(config.replace("model.moe", backend="megablocks"), corpus)
    assert peer.model.moe.backend == "reference"
    held_out = dataclasses.replace(corpus, train=None)
    assert draw_batch(held_out, config, 3, 1, 0).tokens.shape == (3, 16)
