"""The loss with a teacher against its definition in float64, and a run that has one."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from deeploop.config import TrainConfig
from deeploop.model.distillation import distillation_loss
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.runs import checkpoint
from deeploop.train.describe import describe, without_effect
from deeploop.train.setup import open_run
from deeploop.train.step import train_step
from deeploop.utils.errors import InputError
from tests.helpers.data import refused


def inputs(rows=37, d=12, vocab=29, dtype=torch.float64):
    """States, head, targets; states and head of a teacher of another width."""
    torch.manual_seed(0)
    n = torch.randn(rows, d, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, d, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    targets[::5] = -100
    return n, head, targets, torch.randn(rows, 7, dtype=dtype), torch.randn(vocab, 7, dtype=dtype)


def plain(n, head, targets, taught, teacher_head, weight):
    """Both terms from their definitions."""
    keep = targets != -100
    p, q = (n[keep] @ head.T).softmax(-1), (taught[keep] @ teacher_head.T).softmax(-1)
    cross_entropy = -p.gather(1, targets[keep, None]).log().sum()
    divergence = (q * (q / p).log()).sum()
    return (1 - weight) * cross_entropy + weight * divergence, cross_entropy, divergence


@pytest.mark.parametrize("chunk_rows", [1, 7, 37, None])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_equals_the_plain_loss_and_its_gradients(chunk_rows, weight):
    given = inputs()
    found, wanted = distillation_loss(*given, weight, chunk_rows), plain(*given, weight)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    mine, theirs = (torch.autograd.grad(3 * x[0], given[:2]) for x in (found, wanted))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert not (found.cross_entropy.requires_grad or found.divergence.requires_grad)


def test_without_weight_it_is_the_texts_loss_and_a_model_is_its_own_best_teacher():
    n, head, targets, taught, teacher_head = inputs()
    total = distillation_loss(n, head, targets, taught, teacher_head, 0.0).total
    torch.testing.assert_close(total, linear_cross_entropy(n, head, targets))
    total, _, divergence = distillation_loss(n, head, targets, n, head, 1.0)
    gradients = torch.autograd.grad(total, (n, head))
    assert abs(divergence) < 1e-12 and all(g.abs().max() < 1e-12 for g in gradients)


def test_states_of_a_batch_and_bfloat16():
    """Logits are rounded to bfloat16, sums over vocabulary, rows and chunks are not."""
    given = [x.detach().float() for x in inputs(rows=2048, vocab=64) if x.is_floating_point()]
    n, head, taught, teacher_head = given
    targets = inputs(rows=2048, vocab=64)[2]
    head.requires_grad_()
    exact = distillation_loss(n, head, targets, taught, teacher_head, 0.5)
    (dw,) = torch.autograd.grad(exact.total, head)
    low = distillation_loss(
        n.bfloat16().view(2, 1024, -1), head, targets.view(2, 1024),
        taught.bfloat16().view(2, 1024, -1), teacher_head, 0.5, chunk_rows=100,
    )  # fmt: skip
    (dw_low,) = torch.autograd.grad(low.total, head)
    assert low.total.dtype == dw_low.dtype == torch.float32
    assert abs(low.total - exact.total) / exact.total < 2e-4
    assert (dw_low - dw).norm() / dw.norm() < 1e-2


@pytest.mark.parametrize("frozen", ["n", "head", "both"])
def test_a_frozen_side_gets_no_gradient(frozen):
    n, head, *others = inputs()
    n.requires_grad_(frozen == "head")
    head.requires_grad_(frozen == "n")
    total = distillation_loss(n, head, *others, 0.5).total
    if frozen == "both":
        assert not total.requires_grad
        return
    total.backward()
    assert (n.grad is None) == (frozen == "n") and (head.grad is None) == (frozen == "head")


def test_no_rows_and_nothing_but_ignored_targets():
    n, head, targets, taught, teacher_head = inputs()
    terms = distillation_loss(n, head, torch.full_like(targets, -100), taught, teacher_head, 0.5)
    terms.total.backward()
    assert terms.total == 0 and not n.grad.any() and not head.grad.any()
    assert distillation_loss(n[:0], head, targets[:0], taught[:0], teacher_head, 0.5).total == 0


def test_backward_twice_gives_the_same_and_a_second_derivative_is_refused():
    n, *others = inputs()
    total = distillation_loss(n, *others, 0.5).total
    first, second = (torch.autograd.grad(total, n, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(total, n, create_graph=True)


def test_only_a_chunk_of_logits_is_alive():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    given = inputs(rows=400, d=4, vocab=100)
    with Largest() as seen:
        distillation_loss(*given, 0.5, chunk_rows=50).total.backward()
    assert seen.numel <= 50 * 100


def test_a_step_takes_the_gradient_of_both_terms(config):
    """Micro-batches add up to the whole batch; the teacher gets no gradient and stays as it is."""
    config = config.replace("model", vocab_size=31).replace("train", teacher_weight=0.3, clip=0.0)
    torch.manual_seed(1)
    model, teacher = LoopLM(config.model).double(), LoopLM(config.model).double().eval()
    x = torch.randint(0, 31, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.zero_grad = lambda set_to_none: None
    micro = [(x[i : i + 2, :-1], x[i : i + 2, 1:]) for i in (0, 2)]
    metrics = train_step(model, optimizer, config, micro, 0.0, teacher=teacher, observe=True)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    log_p, q = (m.logits(m(x[:, :-1])).log_softmax(-1).flatten(0, 1) for m in (model, teacher))
    q = q.detach().exp()
    cross_entropy = F.nll_loss(log_p, x[:, 1:].flatten())
    divergence = (q * (q.log() - log_p)).sum(-1).mean()
    (0.7 * cross_entropy + 0.3 * divergence).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-6, atol=1e-9)
    assert metrics.total_loss() == pytest.approx(cross_entropy.item())
    assert metrics.figures()["teacher_divergence"] == pytest.approx(divergence.item())
    assert all(p.grad is None for p in teacher.parameters())


def test_a_run_with_a_teacher_comes_nearer_to_it_and_resumes_to_the_bit(config, quiet, tmp_path):
    parent = str(tmp_path / "parent")
    open_run(config.replace("train", out=parent), quiet).fit()
    student = config.replace("train", teacher=parent, teacher_weight=1.0, seed=5)
    trainer = open_run(student, quiet)
    assert f"teacher  {parent}, weight 1" in describe(trainer)
    assert trainer.teacher is not None and not trainer.teacher.training
    trainer.fit()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    figures = [m["teacher_divergence"] for m in map(json.loads, lines) if "loss" in m]
    assert len(figures) == 4 and figures[-1] < 0.5 * figures[0]
    half = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000010"))
    again = open_run(half.config.replace("train", out=str(tmp_path / "fork")), quiet, half)
    again.fit()
    for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_teachers_that_do_not_fit_are_refused(config, quiet, tmp_path, corpus_file):
    parent = str(tmp_path / "parent")
    short = config.replace("train", out=parent, steps=1)
    open_run(short, quiet).fit()
    new = config.replace("train", teacher=parent, out=str(tmp_path / "new"))
    for changed, words in (
        (new.replace("train", teacher="nowhere"), ["train.teacher=", "nowhere", "no such folder"]),
        (new.replace("model", vocab_size=300), ["train.teacher=", "model.vocab_size is 256"]),
        (new.replace("model", seq_len=32), ["train.teacher=", "model.seq_len is 16"]),
    ):
        refused(lambda changed=changed: open_run(changed, quiet), *words)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"backprop": "segments"}, ["train.teacher='x'", "segments"]),
        ({"backprop": "progressive"}, ["train.teacher='x'", "progressive"]),
        ({"loss": "each"}, ["train.teacher='x'", "train.loss last"]),
    ],
)
def test_a_teacher_goes_with_one_loss_after_the_last_loop(config, train, words):
    refused(lambda: config.replace("train", teacher="x", **train), *words)


def test_a_weight_is_a_share_and_needs_a_teacher(config):
    for weight in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match=r"train\.teacher_weight=.*from 0 to 1"):
            TrainConfig(teacher_weight=weight)
    said = without_effect(config.replace("train", teacher_weight=0.9))
    assert said == ["train.teacher_weight=0.9: no effect without train.teacher"]
