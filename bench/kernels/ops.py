"""Inputs and floor of each op, and the contenders that can compute it.

A floor is the least that an op can move, in passes over one [rows, d] tensor (forward, backward):
every activation read once and every result written once, given the tensors that the op saves.
O(rows) statistics and O(d) gains come beside it. The kernels' docstrings have the derivations.

The contenders of an op compute the same function of the same inputs:

* ours: `deeploop.kernels`;
* naive: `deeploop.kernels.reference` in eager mode, the chain that one writes first (upcast,
  square, mean, rsqrt, multiply, downcast); where the reference waits for a count from the device,
  which no CUDA graph can hold, a form of it that does not (`plain`);
* eager: PyTorch's fused calls (torch.add with alpha, F.rms_norm), the best eager code we know;
* compile: torch.compile of naive;
* liger, apex: their fused norms, with PyTorch for the rest of the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop import kernels
from deeploop.kernels import reference, registry
from deeploop.kernels._launch import interpreting

EPS = 1e-6
Norm = Callable[[Tensor, Tensor], Tensor]


Shape = tuple[str, ...]
ROWS, GAIN, EXPERTS, BIAS = ("T", "d"), ("d",), ("E", "d"), ("E",)
ROUTED, SLOTS, WEIGHTS = ("S", "d"), ("T", "k"), ("T", "k")
N_EXPERTS, TOP_K = 32, 4  # E and k; S = T * k rows come from the experts
# Shapes by argument name; gains are named w_....
SHAPES = {
    **dict.fromkeys(("h", "f", "x", "local", "glob", "shared"), ROWS),
    "w": EXPERTS, "bias": BIAS, "routed": ROUTED, "slots": SLOTS, "weights": WEIGHTS,
}  # fmt: skip


class Op(NamedTuple):
    """One op; `eager` and `fused_add` take the inputs in order and the factors by name."""

    name: str
    factors: dict[str, Any]
    # What a compiler moves that fuses all elementwise work into one pass per norm
    # and sums a gain's gradient in the same pass, but makes two norms two kernels.
    compiled: tuple[float, float] | None
    eager: Callable[..., tuple[Tensor, ...]]  # takes the norm to use first
    fused_add: Callable[..., tuple[Tensor, ...]] | None = None  # and Liger's add + norm
    normed: bool = True  # whether a norm is part of it
    plain: Callable[..., tuple[Tensor, ...]] | None = None  # naive, if not the reference

    @property
    def inputs(self) -> dict[str, Shape]:
        """Shapes of the input tensors by name, in order."""
        return {name: SHAPES.get(name, GAIN) for name in registry.OPS[self.name].arguments}

    @property
    def floor(self) -> tuple[int, int]:
        """Fewest passes over [rows, d], forward and backward."""
        return registry.OPS[self.name].floor(TOP_K)

    def run(self, fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """fn, with the signature of deeploop.kernels, on the inputs."""
        return fn(*inputs, **self.factors, **({"eps": EPS} if self.normed else {}))

    def make_inputs(
        self,
        n_rows: int,
        d: int,
        dtype: torch.dtype,
        device: str | torch.device,
        gain_dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Random leaves; rows of that dtype, the rest float32, as a model keeps them."""
        sizes = {"T": n_rows, "d": d, "E": N_EXPERTS, "k": TOP_K, "S": n_rows * TOP_K}
        made = []
        for name, shape in self.inputs.items():
            if name == "slots":
                slots = torch.randperm(sizes["S"], device=device, dtype=torch.int32)
                made.append(slots.view(n_rows, TOP_K))
                continue
            x = torch.randn([sizes[letter] for letter in shape], device=device)
            if shape == GAIN:
                x = x.mul_(0.1).add_(1.0).to(gain_dtype)
            elif shape == EXPERTS:
                x.div_(d**0.5)
            elif shape in (ROWS, ROUTED):
                x = x.to(dtype)
            made.append(x if shape == BIAS else x.requires_grad_())
        return made


# ---------------------------------------------------------------------------
# Best eager, by op


def _post_sandwich(norm: Norm, h, f, w_out, w_next, *, alpha):
    h = norm(torch.add(f, h, alpha=alpha), w_out)
    return h, norm(h, w_next)


def _pre_norm(norm: Norm, h, f, w_next, *, scale):
    h = torch.add(h, f, alpha=scale)
    return h, norm(h, w_next)


def _pre_norm_fused(norm: Norm, add_norm, h, f, w_next, *, scale):
    """The add is part of Liger's kernel, a factor is not."""
    n, h = add_norm(f if scale == 1.0 else f * scale, h, w_next)
    return h, n


def _branch_sandwich(norm: Norm, h, f, w_branch, w_next, *, scale):
    h = torch.add(h, norm(f, w_branch), alpha=scale)
    return h, norm(h, w_next)


def _branch_sandwich_fused(norm: Norm, add_norm, h, f, w_branch, w_next, *, scale):
    f = norm(f, w_branch)
    n, h = add_norm(f if scale == 1.0 else f * scale, h, w_next)
    return h, n


def _looping(norm: Norm, h, f, local, glob, w_next, *, scale, decay, read_local, read_global):
    local = torch.add(local * decay, f, alpha=scale)
    h = torch.add(torch.add(h, local, alpha=read_local), glob, alpha=read_global)
    return h, local, norm(h, w_next)


def _looping_two(norm: Norm, h, f, local, glob, w_next, *, scale, decay, read_local, read_global):
    o = f * scale
    local, glob = torch.add(o, local, alpha=decay), torch.add(o, glob, alpha=decay)
    h = torch.add(torch.add(h, local, alpha=read_local), glob, alpha=read_global)
    return h, local, glob, norm(h, w_next)


def _inject(norm: Norm, h, x, w_next, *, keep, add):
    h = torch.lerp(h, x, add)  # keep is 1 - add here
    return h, norm(h, w_next)


def _load(indices: Tensor, n: int) -> Tensor:
    """torch.bincount, which waits for the device, in a fixed size."""
    flat = indices.flatten()
    return flat.new_zeros(n).scatter_add_(0, flat, torch.ones_like(flat))


def _router(norm: Norm, x, w, bias, *, top_k):
    logits = F.linear(x.float(), w)
    scores = logits.sigmoid()
    indices = (scores + bias).topk(top_k).indices
    weights = scores.gather(1, indices)
    z = logits.logsumexp(1).square().mean()
    return weights / weights.sum(1, True), indices, _load(indices, w.shape[0]), z


def _plain_router(x, w, bias, *, top_k):
    logits = x.float() @ w.T
    score = logits.sigmoid()
    order = (score.detach() + bias).sort(dim=-1, descending=True, stable=True).indices
    indices = order[:, :top_k]
    weights = score.gather(1, indices)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    z = logits.logsumexp(-1).square().sum() / logits.shape[0]
    return weights, indices.int(), _load(indices, w.shape[0]), z


def _gathered(h, routed, slots, weights, shared):
    """The weighted sum of each token's rows, and the shared expert's row."""
    rows = routed.index_select(0, slots.flatten()).view(*slots.shape, -1)
    return torch.baddbmm(shared[:, None], weights.to(h.dtype)[:, None], rows)[:, 0]


def _combine(norm: Norm, h, routed, slots, weights, shared, w_branch, w_next, *, scale):
    f = _gathered(h, routed, slots, weights, shared)
    return _branch_sandwich(norm, h, f, w_branch, w_next, scale=scale)


def _combine_fused(
    norm: Norm, add_norm, h, routed, slots, weights, shared, w_branch, w_next, *, scale
):
    f = _gathered(h, routed, slots, weights, shared)
    return _branch_sandwich_fused(norm, add_norm, h, f, w_branch, w_next, scale=scale)


def _plain_combine(h, routed, slots, weights, shared, w_branch, w_next, *, scale, eps):
    rows = routed.float().index_select(0, slots.flatten()).view(*slots.shape, -1)
    y = (weights[..., None] * rows).sum(1) + shared.float()
    h, n = reference.branch_sandwich(h, y, w_branch, w_next, scale, eps)
    return h, n.to(routed.dtype)


_READS = {"scale": 0.5, "decay": 0.9, "read_local": 0.7, "read_global": 0.3}

# scale = 1 where a peer has no factor: it is met at its best.
OPS = [
    Op("post_sandwich", {"alpha": 2.5}, (5, 9), _post_sandwich),
    Op("pre_norm", {"scale": 1.0}, (4, 5), _pre_norm, _pre_norm_fused),
    Op("branch_sandwich", {"scale": 1.0}, (5, 7), _branch_sandwich, _branch_sandwich_fused),
    Op("looping_update", _READS, (7, 8), _looping),
    Op("looping_update_two", _READS, (8, 9), _looping_two),
    Op("inject", {"keep": 0.7, "add": 0.3}, (4, 5), _inject),
    Op("sigmoid_router", {"top_k": TOP_K}, None, _router, normed=False, plain=_plain_router),
    Op("expert_combine", {"scale": 1.0}, None, _combine, _combine_fused, plain=_plain_combine),
]


# ---------------------------------------------------------------------------
# Contenders


class Contender(NamedTuple):
    """A way to compute an op; `gains` is the dtype its gains come in (None: the rows')."""

    name: str
    run: Callable[[list[Tensor]], tuple[Tensor, ...]]
    gains: torch.dtype | None = torch.float32


def contenders(op: Op, norm: Norm | None = None) -> tuple[list[Contender], dict[str, str]]:
    """All but compile; and why those that are missing are missing. `norm`: eager's."""
    listed = [
        Contender("ours", functools.partial(op.run, getattr(kernels, op.name))),
        # F.rms_norm takes its fused path only where gain and rows agree in dtype.
        Contender("eager", lambda x: op.eager(norm or torch_norm, *x, **op.factors), None),
        Contender("naive", functools.partial(op.run, _chain(op))),
    ]
    missing = {}
    for name, make in (("liger", _liger), ("apex", _apex)):
        if not op.normed:
            missing[name] = f"nothing like {op.name}"
            continue
        try:
            listed.append(make(op))
        except ImportError as error:
            missing[name] = f"not importable here: {error}"
    return listed, missing


def _chain(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    return op.plain or getattr(reference, op.name)


def compiled(op: Op) -> Contender:
    """torch.compile of the naive chain, one graph."""
    fn = torch.compile(_chain(op), fullgraph=True, dynamic=False)
    return Contender("compile", functools.partial(op.run, fn))


def torch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def _liger(op: Op) -> Contender:
    import liger_kernel.ops.fused_add_rms_norm as add_module
    import liger_kernel.ops.rms_norm as norm_module

    if interpreting():
        # Its libdevice.rsqrt is machine code, which the interpreter cannot run.
        norm_module.rsqrt = add_module.rsqrt = lambda x: 1.0 / norm_module.tl.sqrt(x)
    # Not in place: it would overwrite a gradient that the sandwich still needs.
    options = (EPS, 0.0, "gemma", False)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return norm_module.LigerRMSNormFunction.apply(x, w, *options)

    def add_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_module.LigerFusedAddRMSNormFunction.apply(x, residual, w, *options)

    if op.fused_add is not None:
        fused = op.fused_add
        return Contender("liger", lambda x: fused(norm, add_norm, *x, **op.factors))
    return Contender("liger", lambda x: op.eager(norm, *x, **op.factors))


def _apex(op: Op) -> Contender:
    # Another project owns the name `apex` on the index; this module is NVIDIA's.
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return fused_rms_norm_affine(x, w, (x.shape[-1],), EPS)

    return Contender("apex", lambda x: op.eager(norm, *x, **op.factors), None)
