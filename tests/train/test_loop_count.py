"""Training with drawn loops: the same on every rank, after a resume, for a sequence alone."""

import dataclasses
import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from deeploop.config import Config, TrainConfig
from deeploop.config.backprop import segments
from deeploop.config.loop_count import loops_of_sequences, loops_of_step
from deeploop.model.looplm import LoopLM
from deeploop.model.noise import sequence_keys
from deeploop.model.state import Draws
from deeploop.runs import checkpoint
from deeploop.train.backprop import MicroBatch, run_segment
from deeploop.train.optim import make_optimizer
from deeploop.train.setup import open_run
from deeploop.train.step import train_step
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError
from tests.helpers.plain_model import scattered
from tests.model.test_borders import config_of, tokens

HUGINN = {"start": "noise", "inject": "adapter"}
EACH = {"loop_count": "poisson", "loop_count_per": "sequence"}
RUNS = {
    "poisson, last": ({}, {"loop_count": "poisson", "backprop": "last", "backprop_loops": 2}),
    "set, each": ({}, {"loop_count": "set", "loop_set": "1,3,5", "loss": "each"}),
    "poisson for each sequence": (HUGINN, EACH | {"backprop": "last", "backprop_loops": 1}),
    "progressive": ({}, {"backprop": "progressive"}),
    "act": ({"depth": "act", "loop_signal": "add"}, {"loop_count": "poisson"}),
    "expected": ({"depth": "gate"}, {"loss": "expected", "loop_count": "poisson"}),
    "fixed point": (
        {"depth": "fixed_point", "inject": "contractive", "loops": 5},
        {"backprop": "last", "backprop_loops": 2},
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_resumed_run_is_the_unbroken_one(case, config, quiet):
    model, train = RUNS[case]
    run = config.replace("model", **model).replace(
        "train", **{"steps": 4, "save_every": 2, "eval_every": 0, "eval_tokens": 64} | train
    )
    unbroken = open_run(run, quiet)
    unbroken.fit()
    resumed = open_run(
        run.replace("train", out=f"{run.train.out}-2"),
        quiet,
        checkpoint.find(f"{run.train.out}/checkpoints/step_000002"),
    )
    resumed.fit()
    for (name, a), b in zip(
        unbroken.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_ranks_draw_what_one_rank_draws(config, quiet):
    config = config.replace("model", **HUGINN).replace("train", **EACH, micro_batch=2)

    def draws(ranks):
        trainer = open_run(config, quiet, ranks=ranks)
        trainer.done = 5
        batches = trainer.micro_batches()
        trainer.lock.close()
        return [torch.cat(x) for x in zip(*(b.draws for b in batches), strict=True)]

    trainer = open_run(config.replace("train", out=f"{config.train.out}-1"), quiet)
    trainer.sequences, trainer.done = range(2, 4), 5  # as those of the second of two ranks
    whole, second = draws(Ranks()), [torch.cat(x) for x in zip(
        *(b.draws for b in trainer.micro_batches()), strict=True
    )]  # fmt: skip
    assert all(torch.equal(a[2:], b) for a, b in zip(whole, second, strict=True))
    counts = loops_of_sequences(config.train, 2, 5)
    assert (whole[1].max() - whole[1]).tolist() == [c - min(counts) for c in counts]


@pytest.mark.parametrize("last", [1, 2, 9])
def test_a_sequence_with_its_own_loops_is_that_sequence_alone(last):
    """Outputs and gradients, under last(k): each sequence's last k loops have gradient."""
    torch.manual_seed(0)
    model = scattered(LoopLM(config_of(**HUGINN, prelude=1, coda=1, seq_len=8)))
    train = TrainConfig(
        batch_size=3, precision="fp32", backprop="last", backprop_loops=last, loop_count="poisson",
        loop_count_per="sequence",
    )  # fmt: skip
    config = Config(model=model.config, train=train)
    x, y = tokens(3), tokens(3).roll(2, 1)
    step = next(s for s in range(99) if len(set(loops_of_sequences(train, 3, s))) == 3)
    counts = loops_of_sequences(train, 3, step)
    keys = sequence_keys(0, step, range(3))

    def gradients(rows, plan, draws):
        for segment in plan:
            run_segment(model, config, segment, MicroBatch(x[rows], y[rows], draws))

    first = torch.tensor([max(counts) - c for c in counts])
    gradients(slice(0, 3), segments(train, 3, step), Draws(keys, first))
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    alone = dataclasses.replace(train, loop_count="fixed", loop_count_per="batch")
    for row, count in enumerate(counts):
        rows = slice(row, row + 1)
        gradients(rows, segments(alone, count), Draws(keys[rows]))
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "numbered",
    [{"inject": "convex"}, {"loop_signal": "add"}, {"residual": "loom"}, {"inject": "add"}],
)
def test_loops_that_depend_on_their_number_refuse_a_draw_for_each_sequence(numbered, config, quiet):
    config = config.replace("model", **numbered).replace("train", **EACH)
    (field, value), *_ = numbered.items()
    with pytest.raises(InputError, match=r"train\.loop_count_per=sequence") as error:
        open_run(config, quiet)
    assert f"change model.{field}={value}" in str(error.value)
    assert str(error.value).count("model.") == 1 + ("model.start" in str(error.value))


def test_no_number_of_loops_compiles_again():
    torch.compiler.reset()
    model = LoopLM(config_of(seq_len=8))
    for sublayer in model.all_sublayers():
        sublayer.branch.compile(backend="eager")
    train = TrainConfig(batch_size=2, precision="fp32", loop_count="set", loop_set="2,3,5,7")
    config, optimizer = Config(model=model.config, train=train), make_optimizer(model, train)
    graphs, seen = [], []
    for step in range(8):
        train_step(model, optimizer, config, [(tokens(), tokens())], 1e-3, step=step)
        graphs.append(counters["stats"]["unique_graphs"])
        seen.append(loops_of_step(train, 3, step))
    assert len(set(seen)) > 2
    first = next(i for i, (a, b) in enumerate(itertools.pairwise(seen)) if a != b)
    assert graphs[0] == graphs[-1] and first < 7


def test_a_step_follows_the_loops_that_are_drawn(config, quiet):
    config = config.replace("train", loop_count="set", loop_set="2,5", loss="each")
    trainer = open_run(config, quiet)
    for step in range(6):
        figures = trainer.step(observe=True).figures()
        loops = loops_of_step(config.train, 2, step)
        assert figures["loops"] == loops == len(figures["residual_rms"])
        assert len(figures["loop_losses"]) == loops
    trainer.lock.close()


def test_last_of_more_loops_than_are_drawn_is_full_to_the_bit(config, quiet):
    """Also where some steps have fewer loops than get gradients."""
    weights = []
    for i, backprop in enumerate(("full", "last")):
        run = config.replace(
            "train", loop_count="poisson", backprop=backprop, backprop_loops=99, out=f"{i}"
        )
        trainer = open_run(run.replace("train", out=f"{config.train.out}-{i}"), quiet)
        for _ in range(3):
            trainer.step()
        trainer.lock.close()
        weights.append([p.detach() for p in trainer.model.parameters()])
    assert all(map(torch.equal, *weights))
