"""expert_combine: un-permute the experts' rows, add the shared expert, and update.

Forward, per token of d values (w_* one gain per column, or None for all ones):

    y  = sum over j of weights[j] * routed[slots[j]] + shared
    h' = h + scale * y * r1 * w_branch     r1 = 1 / sqrt(mean(y^2)  + eps)
    n  = h' * r2 * w_next                  r2 = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh' and dn (either may be missing), with y1 = y * r1, y2 = h' * r2:

    m2 = mean(dn * w_next * y2)
    T  = dh' + r2 * (dn * w_next - y2 * m2)          all that reaches h'
    g  = scale * T * w_branch              m1 = mean(g * y1)
    dy = r1 * (g - y1 * m1)
    dh = T                                 dshared = dy
    drouted[slots[j]] = weights[j] * dy    dweights[j] = sum of dy * routed[slots[j]]
    dw_branch = sum over tokens of scale * T * y1    dw_next = ... of dn * y2

A slot of -1 is a dropped one: it contributes nothing, whatever its weight, and no
row is read for it. No row of routed may be named by two slots. Rows that no slot
names are never read, so they may hold anything, NaN too; their gradient is zero.
On CUDA nobody checks that slots lie in -1 to the rows of routed: that would wait
for the device. On a CPU a slot out of range is refused.

Shapes: h, shared [..., d] with T tokens, routed [S, d], slots and weights [T, k],
gains [d]; h' and n like h. Dtypes: slots int32 or int64, weights float32; h' as
h, n as routed, each gradient as its tensor; arithmetic float32 (float64 if any
input is), n from the unrounded h'. scale and eps are data: no new value
recompiles anything.

Bytes, in passes over [T, d] (beside O(T k) and O(d)): forward k + 4 (reads k rows
of routed, shared, h; writes h', n), backward 2 k + 6 (reads dh', dn, h, shared,
k rows; writes dh, dshared, k rows of drouted). Without shared one and two fewer.
Saved are the inputs, h only where there is a norm; the update before holds it as
its h' already. Saving y in the place of shared would cost forward one write more,
and the backward reads the k rows for dweights in any case: y is added up again
from them, and they come a second time out of L1 or L2.

Each row of drouted is written once, by the token that owns it, which also leaves
a mark of one byte; a last kernel reads the S marks and writes zeros to the rows
without one. (Zeros everywhere first would be k passes more.) Gains are added up
as in post_sandwich: float32 partial sums, no atomics. Rows wider than d = 2048
are read in chunks, once for their sums and once for the gradients, the second
time out of L1 or L2. Speed on a GPU: not yet measured.

Source: LOOM's MoE branch (scale = gamma); the weighted sum is the usual one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.errors import InputError

from . import rows
from .branch_sandwich import _backward_torch as _branch_backward
from .branch_sandwich import _forward_torch as _branch_forward
from .triton.expert_combine import aot_launches, backward_launches, forward_launch

__all__ = ["aot_launches", "expert_combine"]


def expert_combine(
    h: Tensor,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float = 1e-6,
    norm: bool = True,
) -> tuple[Tensor, rows.Normed]:
    """h' = h + scale * RMSNorm(combined experts) * w_branch ; n = RMSNorm(h') * w_next.

    n is None where norm is off.
    """
    _check(h, routed, slots, weights, shared)
    rows.check_gains("expert_combine", h, w_branch=w_branch, w_next=w_next)
    rows.check_norm("expert_combine", norm, w_next)
    numbers = rows.numbers(scale, eps)
    h_new, n, _, _ = _forward(h, routed, slots, weights, shared, w_branch, w_next, numbers, norm)
    return h_new, n if norm else None


def _check(
    h: Tensor, routed: Tensor, slots: Tensor, weights: Tensor, shared: Tensor | None
) -> None:
    """Refuse tensors that do not describe the same tokens."""
    given = {"h": h} if shared is None else {"h": h, "shared": shared}
    rows.check_rows("expert_combine", **given)
    rows.check_rows("expert_combine", routed=routed)
    rows.check_rows("expert_combine", weights=weights)
    tokens, d = rows.count(h), h.shape[-1]
    k = weights.shape[-1]
    for name, x, allowed in (
        ("routed", routed, ["rows", d]), ("weights", weights, [tokens, k]),
        ("slots", slots, [tokens, k]),
    ):  # fmt: skip
        if x.dim() != 2 or x.shape[1] != allowed[1] or allowed[0] not in ("rows", x.shape[0]):
            shape = ", ".join(map(str, allowed))
            raise InputError(
                f"expert_combine: {name} has shape {list(x.shape)}; allowed: [{shape}]"
            )
        if x.device != h.device:
            raise InputError(
                f"expert_combine: {name} is on {x.device}; allowed: the device of h, {h.device}"
            )
    for name, x, dtypes in (
        ("slots", slots, (torch.int32, torch.int64)),
        ("weights", weights, (torch.float32, torch.float64)),
    ):
        if x.dtype not in dtypes:
            allowed_dtypes = ", ".join(str(t).removeprefix("torch.") for t in dtypes)
            raise InputError(
                f"expert_combine: {name} has dtype {x.dtype}; allowed: {allowed_dtypes}"
            )


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _bags(slots: Tensor, n_routed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which slots were kept, their row numbers in order, and where each token's begin."""
    for end in map(int, slots.aminmax()) if slots.numel() else ():
        if not -1 <= end < n_routed:
            raise InputError(
                f"expert_combine: slots reaches {end}; "
                f"allowed: -1 (dropped) to {n_routed - 1}, the rows of routed"
            )
    kept = slots >= 0
    count = kept.sum(1)
    return kept, slots[kept].long(), count.cumsum(0) - count


def _combine_torch(routed: Tensor, slots: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """y, without the [T, k, d] tensor that indexing would make."""
    kept, index, begin = _bags(slots, routed.shape[0])
    y = F.embedding_bag(index, routed, begin, mode="sum", per_sample_weights=weights[kept])
    return y if shared is None else y.add_(shared)


def _spread_torch(
    dy: Tensor, routed: Tensor, slots: Tensor, weights: Tensor, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """drouted and dweights in the dtype of dy."""
    kept, index, begin = _bags(slots, routed.shape[0])
    token = kept.nonzero()[:, 0]
    drouted = dweights = None
    if needs[0]:
        # The sum over the one or no token that owns each row.
        order = index.argsort()
        owned = torch.bincount(index, minlength=routed.shape[0])
        drouted = F.embedding_bag(
            token[order], dy, owned.cumsum(0) - owned, mode="sum",
            per_sample_weights=weights[kept][order],
        )  # fmt: skip
    if needs[1]:
        dweights = torch.zeros_like(weights)
        # What autograd calls for embedding_bag; mode 0 is the sum, -1 no padding row.
        dweights[kept] = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            dy, routed, index, begin, token, 0, -1
        )
    return drouted, dweights


def _forward_torch(
    h: Tensor,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float,
    norm: bool,
) -> tuple[Tensor | None, ...]:
    dtype = rows.compute_dtype(h, routed, weights, shared, w_branch, w_next)
    y = _combine_torch(routed.to(dtype), slots, weights.to(dtype), shared)
    h_new, n, r1, r2 = _branch_forward(h, y, w_branch, w_next, scale, eps, norm)
    return h_new, None if n is None else n.to(routed.dtype), r1, r2


def _backward_torch(
    dh_new: Tensor | None,
    dn: Tensor | None,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    h: Tensor | None,
    r1: Tensor,
    r2: Tensor | None,
    scale: float,
    h_dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """dh, drouted, dweights, dshared, dw_branch, dw_next."""
    dtype = r1.dtype
    need_h, need_routed, need_weights, need_shared, need_branch, need_next = needs
    rows_, weights_ = routed.to(dtype), weights.to(dtype)
    y = _combine_torch(rows_, slots, weights_, shared)
    need_y = need_routed or need_weights or need_shared
    dh, dy, dw_branch, dw_next = _branch_backward(
        dh_new, dn, h, y, w_branch, w_next, r1, r2, scale, h_dtype,
        [need_h, need_y, need_branch, need_next],
    )  # fmt: skip
    drouted = dweights = dshared = None
    if dy is not None:
        drouted, dweights = _spread_torch(dy, rows_, slots, weights_, [need_routed, need_weights])
        drouted = None if drouted is None else drouted.to(routed.dtype)
        dweights = None if dweights is None else dweights.to(weights.dtype)
        dshared = dy.to(shared.dtype) if need_shared and shared is not None else None
    return dh, drouted, dweights, dshared, dw_branch, dw_next


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::expert_combine", mutates_args=())
def _forward(
    h: Tensor,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    numbers: Tensor,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h', n, r1, r2 (the last two [T], for the backward); n and r2 empty without norm."""
    scale, eps = numbers.tolist()
    rows.check_numbers("expert_combine", eps, scale=scale)
    shape, h, shared = h.shape, rows.as_rows(h), rows.maybe_rows(shared)
    routed, slots, weights = (x.contiguous() for x in (routed, slots, weights))
    w_branch, w_next = rows.packed(w_branch), rows.packed(w_next)
    fused = rows.uses_triton(h, routed, weights, shared, w_branch, w_next)
    args = (h, routed, slots, weights, shared, w_branch, w_next, scale, eps, norm)
    h_new, n, r1, r2 = rows.results(h, fused, forward_launch, _forward_torch, *args)
    n = h.new_empty(0) if n is None else n.view(shape)
    return h_new.view(shape), n, r1, h.new_empty(0) if r2 is None else r2


@_forward.register_fake
def _(h, routed, slots, weights, shared, w_branch, w_next, numbers, norm):
    dtype = rows.compute_dtype(h, routed, weights, shared, w_branch, w_next)
    r1 = h.new_empty((rows.count(h),), dtype=dtype)
    n = routed.new_empty(h.shape) if norm else h.new_empty(0)
    return h.new_empty(h.shape), n, r1, torch.empty_like(r1) if norm else h.new_empty(0)


@torch.library.custom_op("deeploop::expert_combine_backward", mutates_args=())
def _backward(
    dh_new: Tensor | None,
    dn: Tensor | None,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    h: Tensor | None,
    r1: Tensor,
    r2: Tensor | None,
    numbers: Tensor,
    h_dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients asked for: h, routed, weights, shared, w_branch, w_next."""
    given = dn if dh_new is None else dh_new
    assert given is not None, "the autograd formula calls this with dh_new or dn"
    shape = given.shape
    dh_new, dn, shared, h = (rows.maybe_rows(x) for x in (dh_new, dn, shared, h))
    routed, slots, weights = (x.contiguous() for x in (routed, slots, weights))
    w_branch, w_next = rows.packed(w_branch), rows.packed(w_next)
    scale, _ = numbers.tolist()
    args = (
        dh_new, dn, routed, slots, weights, shared, w_branch, w_next, h, r1, r2, scale, h_dtype,
        needs,
    )  # fmt: skip
    fused = rows.uses_triton(routed, r1)
    found = rows.results(routed, fused, backward_launches, _backward_torch, *args)
    dh, drouted, dweights, dshared, *gains = found
    if dweights is not None and dweights.dim() == 3:  # a share of each program of a row
        dweights = dweights[0] if dweights.shape[0] == 1 else dweights.sum(0)
    gains = map(rows.gain_gradient, gains, (w_branch, w_next), needs[4:])
    dh, dshared = (None if g is None else g.view(shape) for g in (dh, dshared))
    return rows.found(None, dh, drouted, dweights, dshared, *gains)


@_backward.register_fake
def _(
    dh_new, dn, routed, slots, weights, shared, w_branch, w_next, h, r1, r2, numbers, h_dtype,
    needs,
):  # fmt: skip
    shape = (dn if dh_new is None else dh_new).shape
    dh = routed.new_empty(shape, dtype=h_dtype)
    inputs = (dh, routed, weights, shared, w_branch, w_next)
    return [x.new_empty(x.shape) for x, need in zip(inputs, needs, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, *rest, numbers, norm = inputs
    _, _, r1, r2 = output
    ctx.h_dtype = h.dtype
    held = (h, r1, r2) if norm else (None, r1, None)
    ctx.save_for_backward(*rest, *held, numbers)
    ctx.mark_non_differentiable(r1, r2)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh_new: Tensor | None, dn: Tensor | None, *_: None) -> tuple[Any, ...]:
    *saved, numbers = ctx.saved_tensors
    if saved[-1] is None:  # no norm: n is a stand-in without values
        dn = None
    if dh_new is None and dn is None:
        return (None,) * 9
    asked = ctx.needs_input_grad
    needs = [asked[0], asked[1], *asked[3:7]]
    found = iter(_backward(dh_new, dn, *saved, numbers, ctx.h_dtype, needs))
    dh, drouted, *others = (next(found) if need else None for need in needs)
    return dh, drouted, None, *others, None, None


_forward.register_autograd(_gradients, setup_context=_save)
