"""What every residual rule must hold, and that a rule stays in its own file."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import deeploop
from deeploop.config import LoomConfig, ModelConfig, MoEConfig
from deeploop.config.model import RESIDUALS
from deeploop.model.looplm import LoopLM
from deeploop.model.residual import Residual, residual_rule
from deeploop.model.state import LoopState, Visit
from tests.helpers.plain_model import (
    EPS,
    ROPE_BASE,
    check_gradients,
    plain_forward,
    rms_norm,
    scattered,
)

EXPERTS = MoEConfig(experts=4, top_k=2, d_expert=8, shared=1, capacity_factor=0.0)
ROUTED_ALONE = dataclasses.replace(EXPERTS, shared=0)


def small(residual: str, **changes) -> ModelConfig:
    base = ModelConfig(
        residual=residual, d_model=16, n_layers=2, loops=3, n_heads=2, vocab_size=31, seq_len=16,
        norm_eps=EPS, rope_base=ROPE_BASE, embed_std=0.25,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def tokens(batch=2, length=16, vocab=31):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [{}, {"prelude": 1, "coda": 2}], ids=["loops", "prelude-coda"])
@pytest.mark.parametrize("moe", [MoEConfig(), EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_model_and_gradients_are_those_of_the_rules_reference(residual, moe, shape):
    torch.manual_seed(0)
    model = scattered(LoopLM(small(residual, moe=moe, **shape)))
    check_gradients(model, tokens(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["grouped_mm", "reference"])
@pytest.mark.parametrize(
    ("residual", "loom"), [*((name, {}) for name in RESIDUALS), ("loom", {"branch_norm": False})]
)
def test_experts_without_a_shared_one(residual, loom, backend):
    torch.manual_seed(0)
    moe = dataclasses.replace(ROUTED_ALONE, backend=backend)
    model = scattered(LoopLM(small(residual, moe=moe, loom=LoomConfig(**loom))))
    check_gradients(model, tokens(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("coda", [0, 1])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_other_numbers_of_loops_end_in_the_same_norm(residual, coda):
    """Run with other loops than in training, or cut into segments: the final gain is the same."""
    torch.manual_seed(0)
    model, x = scattered(LoopLM(small(residual, coda=coda))), tokens()
    state = None
    for first, end in ((0, 1), (1, 3), (3, 4)):  # training has 3
        wanted = plain_forward(model, x, loops=end)
        state = model.run(x, range(first, end), state)
        torch.testing.assert_close(model.output(state, x), wanted, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(model(x, loops=end), wanted, rtol=1e-8, atol=1e-10)
        state = model.rule.detach(state)


@pytest.mark.parametrize("residual", ["pre_norm", "deepnorm", "deeploop", "loom"])
def test_reference_is_the_papers_equation(residual):
    """On numbers of one sublayer in the first loop, with alpha and gamma from the formulas."""
    torch.manual_seed(0)
    model = scattered(LoopLM(small(residual)))
    h, f = torch.randn(2, 1, 3, 16, dtype=torch.float64)
    alpha = {"deepnorm": 12**0.25, "deeploop": 12**0.5}.get(residual)
    gamma = 0.5 / (3 * 2**0.5)
    for j, sublayer in enumerate(model.sublayers[:2]):
        made = model.rule.reference(LoopState(h), f, Visit(0, 0, j, sublayer, None)).h
        wanted = {
            "pre_norm": lambda: h + f,
            "deepnorm": lambda s=sublayer: rms_norm(alpha * h + f, s.gain_out),
            "deeploop": lambda s=sublayer: rms_norm(alpha * h + f, s.gain_out),
            "loom": lambda j=j, s=sublayer: (
                h + gamma * rms_norm(f, s.gain_out) if j else h + 2 * gamma * f
            ),
        }[residual]()
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_every_value_names_a_rule():
    for name in RESIDUALS:
        assert isinstance(residual_rule(small(name)), Residual)


def test_no_other_file_tests_a_rules_name():
    """A rule's name stands in its own file, in the registry, and in presets alone."""
    root = Path(deeploop.__file__).parent
    allowed = {root / "config" / "model.py", root / "config" / "renames.py"}
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts
        if path in allowed or "presets" in folders or "residual" in folders or "kernels" in folders:
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            # The package, its ops and its cache folder are called deeploop, too.
            if isinstance(node, ast.Constant) and node.value in set(RESIDUALS) - {"deeploop"}:
                raise AssertionError(f"{path}:{node.lineno} names the rule {node.value}")
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not ("residual" in text and "'deeploop'" in text), f"{path}: {text}"
