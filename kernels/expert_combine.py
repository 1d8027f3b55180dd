"""expert_combine: weighted sum of each token's expert outputs, then branch_sandwich on it.

Forward, per token of d values (w_* one gain per column, or None for all ones):

    y  = sum over j of weights[j] * routed[slots[j]] + shared
    h' = h + scale * y * r1 * w_branch     r1 = 1 / sqrt(mean(y^2)  + eps)
    n  = h' * r2 * w_next                  r2 = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh' and dn (either may be None), with y1 = y * r1, y2 = h' * r2:

    m2 = mean(dn * w_next * y2)
    T  = dh' + r2 * (dn * w_next - y2 * m2)          total gradient of h'
    g  = scale * T * w_branch              m1 = mean(g * y1)
    dy = r1 * (g - y1 * m1)
    dh = T                                 dshared = dy
    drouted[slots[j]] = weights[j] * dy    dweights[j] = sum of dy * routed[slots[j]]
    dw_branch = sum over tokens of scale * T * y1    dw_next = ... of dn * y2

A slot of -1 means dropped: it contributes nothing, whatever its weight, and no row is
read for it. No two slots may name the same row of routed. Rows that no slot names are
never read and may hold anything, NaN too; their gradient is zero. On CUDA slots are
not checked against the rows of routed, as that would wait for the device; on a CPU a
slot out of range is refused.

Shapes: h, shared [..., d] with T tokens, routed [S, d], slots and weights [T, k],
gains [d]; h' and n like h. Dtypes: slots int32 or int64, weights float32; h' as
h, n as routed, each gradient as its tensor; arithmetic in float32 (float64 if
any input is), n from the unrounded h'. scale and eps are data: no value
compiles the kernel again.

Bytes, in passes over [T, d] (plus O(T k) and O(d)): forward k + 4 (reads k rows of
routed, shared, h; writes h', n), backward 2 k + 6 (reads dh', dn, h, shared, k rows;
writes dh, dshared, k rows of drouted). Without shared one and two fewer.

Saved for backward: all inputs, r1 and r2; h only with the norm, and the previous
update already keeps it alive as its h'. Saving y instead of shared would cost forward
one more write, while the backward reads the k rows for dweights in any case: it
computes y again from them, and the second read hits L1 or L2.

Each row of drouted is written once, by the token whose slot names it, which also
sets one byte for that row; a last kernel reads these S bytes and writes zeros to the
rows that no slot names. (Zeroing everything first would be k more passes.) The
gradients of the gains are accumulated as in post_sandwich: float32 partial sums, no
atomics. Rows wider than d = 2048 are read in chunks, once for their sums and once
for the gradients, the second time from L1 or L2. Speed on a GPU: not yet measured.

Source: LOOM's MoE branch (arXiv 2610.01153), scale = gamma; the weighted sum is the
standard mixture-of-experts combine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.utils.errors import InputError

from . import _aten
from ._checks import check_gains, check_norm, check_numbers, check_rows
from ._launch import uses_triton
from ._op import Normed, Saved, as_data, define, fake_gradients, fake_update, run
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
) -> tuple[Tensor, Normed]:
    """Sum each token's weighted expert outputs, norm the sum and add it to the stream.

    y = sum_j weights[j] * routed[slots[j]] + shared,
    h' = h + scale * RMSNorm(y) * w_branch,  n = RMSNorm(h') * w_next.

    Args:
        h: residual stream, [..., d] with T tokens, a float dtype.
        routed: expert outputs, [S, d], a float dtype.
        slots: rows of routed for each token, [T, k], int32 or int64; -1 means dropped.
        weights: combine weights, [T, k], float32 or float64.
        shared: output of the shared expert, like h, or None.
        w_branch: gain of the branch norm, [d], or None for ones.
        w_next: gain of the next sublayer's norm, [d], or None for ones.
        scale: factor of the normed branch; a run-time number: no value compiles the kernel again.
        eps: added to the mean square under both roots.
        norm: False leaves the second norm out; w_next must then be None.

    Returns:
        h', shape and dtype of h, and n, shape of h and dtype of routed (None if norm is
        False).

    Raises:
        InputError: if shapes, dtypes or devices disagree, a number is not finite, or (on
            a CPU alone) a slot is out of range.

    Source: LOOM's MoE branch (arXiv 2610.01153) with scale = gamma.
    """
    _check(h, routed, slots, weights, shared)
    check_gains("expert_combine", h, w_branch=w_branch, w_next=w_next)
    check_norm("expert_combine", norm, w_next)
    numbers = as_data(scale, eps)
    h_new, n, _, _ = _forward(h, routed, slots, weights, shared, w_branch, w_next, numbers, norm)
    return h_new, n if norm else None


def _check(
    h: Tensor, routed: Tensor, slots: Tensor, weights: Tensor, shared: Tensor | None
) -> None:
    """Refuse tensors that do not describe the same tokens."""
    given = {"h": h} if shared is None else {"h": h, "shared": shared}
    check_rows("expert_combine", **given)
    check_rows("expert_combine", routed=routed)
    check_rows("expert_combine", weights=weights)
    tokens, d = _aten.count(h), h.shape[-1]
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
    """Mask of the slots not dropped, their row numbers in order, and each token's first one."""
    for end in map(int, slots.aminmax()) if slots.numel() else ():
        if not -1 <= end < n_routed:
            raise InputError(
                f"expert_combine: slots reaches {end}; "
                f"allowed: -1 (dropped) to {n_routed - 1}, the rows of routed"
            )
    mask = slots >= 0
    count = mask.sum(1)
    return mask, slots[mask].long(), count.cumsum(0) - count


def _combine_torch(routed: Tensor, slots: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """Compute y without the [T, k, d] tensor that indexing would make."""
    mask, index, begin = _bags(slots, routed.shape[0])
    y = F.embedding_bag(index, routed, begin, mode="sum", per_sample_weights=weights[mask])
    return y if shared is None else y.add_(shared)


def _spread_torch(
    dy: Tensor, routed: Tensor, slots: Tensor, weights: Tensor, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute drouted and dweights in the dtype of dy, None where not needed."""
    mask, index, begin = _bags(slots, routed.shape[0])
    token = mask.nonzero()[:, 0]
    drouted = dweights = None
    if needs[0]:
        # Each row gets a sum over the one token whose slot names it, or over none.
        order = index.argsort()
        tokens = torch.bincount(index, minlength=routed.shape[0])
        drouted = F.embedding_bag(
            token[order], dy, tokens.cumsum(0) - tokens, mode="sum",
            per_sample_weights=weights[mask][order],
        )  # fmt: skip
    if needs[1]:
        dweights = torch.zeros_like(weights)
        # The call autograd makes for embedding_bag; mode 0 is the sum, -1 no padding row.
        dweights[mask] = torch.ops.aten._embedding_bag_per_sample_weights_backward(
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
    dtype = _aten.compute_dtype(h, routed, weights, shared, w_branch, w_next)
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
    """Compute dh, drouted, dweights, dshared, dw_branch, dw_next; None where not needed."""
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


def _run_forward(h, routed, slots, weights, shared, w_branch, w_next, numbers, norm):
    """Compute h', n, r1, r2; the last two are [T], n and r2 None without the norm."""
    scale, eps = numbers.tolist()
    check_numbers("expert_combine", eps, scale=scale)
    h_rows, shared = _aten.as_rows(h, shared)
    routed, slots, weights, *gains = _aten.packed(routed, slots, weights, w_branch, w_next)
    args = (h_rows, routed, slots, weights, shared, *gains, scale, eps, norm)
    fused = uses_triton(h_rows, routed, weights, shared, *gains)
    h_new, n, *stats = run(fused, h, forward_launch, _forward_torch, *args)
    return *_aten.view_as(h.shape, h_new, n), *stats


def _run_backward(
    dh_new, dn, routed, slots, weights, shared, w_branch, w_next, h, r1, r2, numbers, h_dtype,
    needs,
):  # fmt: skip
    shape = (dn if dh_new is None else dh_new).shape
    dh_new, dn, shared, h = _aten.as_rows(dh_new, dn, shared, h)
    routed, slots, weights, *gains = _aten.packed(routed, slots, weights, w_branch, w_next)
    scale, _ = numbers.tolist()
    args = (dh_new, dn, routed, slots, weights, shared, *gains, h, r1, r2, scale, h_dtype, needs)
    fused = uses_triton(routed, r1)
    dh, drouted, dweights, dshared, *dgains = run(
        fused, routed, backward_launches, _backward_torch, *args
    )
    if dweights is not None and dweights.dim() == 3:  # one share for each program of a row
        dweights = dweights[0] if dweights.shape[0] == 1 else dweights.sum(0)
    dh, dshared = _aten.view_as(shape, dh, dshared)
    return dh, drouted, dweights, dshared, *map(_aten.gain_gradient, dgains, gains, needs[4:])


def _fake(h, routed, slots, weights, shared, w_branch, w_next, numbers, norm):
    dtype = _aten.compute_dtype(h, routed, weights, shared, w_branch, w_next)
    return fake_update(h, routed, dtype, norm)


def _fake_backward(
    dh_new, dn, routed, slots, weights, shared, w_branch, w_next, h, r1, r2, numbers, h_dtype,
    needs,
):  # fmt: skip
    dh = routed.new_empty((dn if dh_new is None else dh_new).shape, dtype=h_dtype)
    return fake_gradients(needs, dh, routed, weights, shared, w_branch, w_next)


def _save(inputs, output):
    h, *rest, numbers, norm = inputs
    _, _, r1, r2 = output
    saved = (h, r1, r2) if norm else (None, r1, None)
    return Saved((*rest, *saved, numbers), (h.dtype,))


_forward, _backward = define(
    "expert_combine",
    arguments="Tensor h, Tensor routed, Tensor slots, Tensor weights, Tensor? shared, "
    "Tensor? w_branch, Tensor? w_next, Tensor numbers, bool norm",
    results=("h_new", "n", "r1", "r2"),
    gradients_from=("h_new", "n"),
    gradients_for=("h", "routed", "weights", "shared", "w_branch", "w_next"),
    forward=_run_forward,
    fake=_fake,
    save=_save,
    backward_arguments="Tensor? dh_new, Tensor? dn, Tensor routed, Tensor slots, Tensor weights, "
    "Tensor? shared, Tensor? w_branch, Tensor? w_next, Tensor? h, Tensor r1, Tensor? r2, "
    "Tensor numbers, ScalarType h_dtype, bool[] needs",
    backward=_run_backward,
    backward_fake=_fake_backward,
)
