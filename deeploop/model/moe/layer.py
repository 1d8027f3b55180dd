"""Mixture of experts for looped models: per-loop routers over shared experts.

For the N tokens n of one visit in loop t, with router R_t [E, d]:

    weights, indices, load, z = sigmoid_router(n, R_t, bias, k)       float32
    expert_out = the chosen experts' SwiGLUs, rows grouped by expert
    shared   = n_shared SwiGLUs that every token takes, summed

and `expert_combine` then adds up weights[j] * expert_out[slots[j]] + shared. Experts, shared
experts and bias belong to the sublayer, hence to all loops; only the router differs between
loops, and loops past the last router use the last one. All start as copies of the first
(as in LOOM, so that experts of late loops do not starve at first).

Capacity, in training only: each expert keeps the cap = max(1, int(c N k / E)) slots of
highest weight (equals: the earlier token). The others are dropped: slot -1, weight 0,
and the token's weights are divided by the sum of those kept; a token that keeps none
is left with its shared experts. Dropped rows are computed all the same, so that every
shape is known before the routing is.

The slots are grouped by one sort: by expert and, with a capacity, by falling weight within
the expert. Nothing reads a value back to the host.

Source: LOOM's MoE (30 routed + 2 shared experts, capacity factor 1.5) and its load
balancing without an auxiliary loss (`update_router_bias_`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deeploop.kernels import sigmoid_router
from deeploop.model.mlp import SwiGLU
from deeploop.model.moe import experts, megablocks
from deeploop.utils.device import autocast_dtype
from deeploop.utils.errors import InputError

BACKENDS = ("grouped_mm", "reference", "megablocks")
SMALLEST = 1e-30  # of the sum that the kept weights are divided by


class Routed(NamedTuple):
    """A MoE's outputs before they are combined, and its router's statistics."""

    expert_out: Tensor  # [N k, d] grouped by expert (megablocks: [N, d], already combined)
    slots: Tensor  # int32 [N, k]: each token's rows of expert_out; -1: dropped
    weights: Tensor  # float32 [N, k], normalised over the kept slots
    shared: Tensor | None  # [..., d] sum of the always-on shared experts
    z: Tensor  # scalar: mean logsumexp^2 of the router's logits
    load: Tensor  # int64 [E]: slots per expert, dropped ones included
    shape: torch.Size  # [..., d] of the tokens, N in all


def combine(f: Tensor | Routed) -> Tensor:
    """Combine expert outputs: sum over j of weights[j] * expert_out[slots[j]] + shared, [..., d].

    For rules whose kernel takes one tensor (a dense branch's output is returned unchanged);
    `expert_combine` fuses it with LOOM's update. Sums in float32 (float64 where expert_out
    is), rounded once.
    """
    if isinstance(f, Tensor):
        return f
    out, dtype = f.expert_out, torch.promote_types(f.expert_out.dtype, torch.float32)
    kept = (f.slots >= 0)[..., None]
    chosen = out[f.slots.clamp(min=0).long()].where(kept, 0).to(dtype)
    y = torch.einsum("nk,nkd->nd", f.weights.to(dtype), chosen).view(f.shape)
    return (y if f.shared is None else y + f.shared).to(out.dtype)


class Groups(NamedTuple):
    """(token, expert) slots in the order of their experts."""

    token: Tensor  # int32 [N k]: the token of each row
    inverse: Tensor  # int32 [N, k]: the row of each slot
    ends: Tensor  # int32 [E]: end of each expert's rows


def group(indices: Tensor, load: Tensor, weights: Tensor | None) -> Groups:
    """Sort the slots by expert; with weights, by falling weight within each expert.

    indices int32 [N, k], load int64 [E], weights [N, k] (float32, at least 0). Equal
    slots stand in the order of their tokens.
    """
    n_slots, top_k = indices.numel(), indices.shape[1]
    if weights is None:
        key = indices.flatten()
    else:
        # The bits of floats from 0 up rise with them; without the sign bit a NaN stays
        # with its expert, as the largest.
        bits = weights.detach().float().contiguous().view(torch.int32) & 0x7FFFFFFF
        key = ((indices.long() << 31) | (0x7FFFFFFF - bits)).flatten()
    order = key.argsort(stable=True)
    position = torch.arange(n_slots, dtype=torch.int32, device=indices.device)
    inverse = torch.empty_like(position).scatter_(0, order, position)
    token = torch.div(order, top_k, rounding_mode="floor").int()
    return Groups(token, inverse.view(-1, top_k), load.cumsum(0).int())


def drop(
    groups: Groups, indices: Tensor, load: Tensor, weights: Tensor, cap: int
) -> tuple[Tensor, Tensor]:
    """Drop each expert's slots past the first `cap`; returns the slots and weights that remain."""
    begins = groups.ends - load.int()
    kept = groups.inverse - begins[indices.long()] < cap
    slots = groups.inverse.where(kept, -1)
    weights = weights.where(kept, 0)
    return slots, weights / weights.sum(-1, keepdim=True).clamp(min=SMALLEST)


class MoE(nn.Module):
    """n_experts routed SwiGLUs, top_k a token, and n_shared that every token takes.

    gate_up [E, 2 d_expert, d_model] and down [E, d_model, d_expert] hold the routed
    experts, `shared` the others as one SwiGLU n_shared * d_expert wide (None without).
    routers [E, d_model] are separate parameters, so that the backward of some loops leaves
    the others' gradients None. bias [E] steers the choice alone (`update_router_bias_`).
    """

    bias: Tensor

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        top_k: int,
        d_expert: int,
        n_shared: int,
        n_routers: int,
        capacity_factor: float,
        backend: str = "grouped_mm",
    ):
        super().__init__()
        _check(n_experts, top_k, d_expert, n_shared, n_routers, capacity_factor, backend)
        self.top_k, self.capacity_factor, self.backend = top_k, capacity_factor, backend
        self.routers = nn.ParameterList(
            torch.empty(n_experts, d_model, dtype=torch.float32) for _ in range(n_routers)
        )
        self.gate_up = nn.Parameter(torch.empty(n_experts, 2 * d_expert, d_model))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, d_expert))
        self.shared = SwiGLU(d_model, n_shared * d_expert) if n_shared else None
        self.register_buffer("bias", torch.zeros(n_experts, dtype=torch.float32))
        for matrix in (self.routers[0], self.gate_up, self.down):
            nn.init.uniform_(matrix, -(matrix.shape[-1] ** -0.5), matrix.shape[-1] ** -0.5)
        copy_router(self)
        # In a tuple, so that its parameters are not registered as the model's.
        self._peer = (megablocks.build(self),) if backend == "megablocks" else ()

    def router(self, loop: int) -> Tensor:
        """Return the router [E, d_model] of a loop counted from 0."""
        return self.routers[min(loop, len(self.routers) - 1)]

    def forward(self, n: Tensor, router: Tensor) -> Routed:
        """Route n [..., d_model] by one of this module's routers [E, d_model], and run the experts.

        The argument is the matrix, not the loop's number: one compiled graph serves every loop.
        """
        n = n.to(autocast_dtype(n))
        weights, indices, load, z = sigmoid_router(n, router, self.bias, self.top_k)
        shared = None if self.shared is None else self.shared(n, None)
        cap = self.capacity(weights.shape[0])
        groups = group(indices, load, None if cap is None else weights)
        slots = groups.inverse
        if cap is not None:
            slots, weights = drop(groups, indices, load, weights, cap)
        x = n.reshape(-1, n.shape[-1])
        if self._peer:
            expert_out, slots, weights = megablocks.run(self._peer[0], self, x, weights, indices)
        else:
            run = experts.grouped_mm if self.backend == "grouped_mm" else experts.reference
            expert_out = run(x, self.gate_up, self.down, *groups)
        return Routed(expert_out, slots, weights, shared, z, load, n.shape)

    def capacity(self, n_tokens: int) -> int | None:
        """Return the slots an expert takes of one micro-batch; None where there is no limit."""
        share = self.capacity_factor * self.top_k / self.down.shape[0]  # of the tokens
        if not self.training or not 0 < share < 1:
            return None
        return max(1, int(self.capacity_factor * n_tokens * self.top_k / self.down.shape[0]))

    def over_capacity(self, load: Tensor) -> Tensor | None:
        """Return the slots that each expert drops: loads int64 [..., E] of visits, one a row.

        None where there is no limit. A visit's tokens are counted by its slots, as not every
        loop need have all of a micro-batch's.
        """
        if self.capacity(1) is None:
            return None
        tokens = load.sum(-1, keepdim=True).double() / self.top_k
        cap = self.capacity_factor * tokens * self.top_k / self.down.shape[0]  # as `capacity`
        return (load - cap.floor().clamp_min(1).long()).clamp_min(0)


def copy_router(moe: MoE) -> None:
    """Make every loop's router a copy of the first."""
    with torch.no_grad():
        for router in list(moe.routers)[1:]:
            router.copy_(moe.routers[0])


@torch.no_grad()
def update_router_bias_(bias: Tensor, load: Tensor, lr: float, centred: bool = True) -> None:
    """Add lr * sign(mean(load) - load) to the bias, in place.

    Args:
        bias: float32 [E].
        load: int64 [E], of the whole batch. Loads are compared as integers, E load with the
            sum, so that a load at the mean counts as such.
        lr: step size.
        centred: subtract the bias's mean after it. The choice of experts stays the same, as
            all scores move by as much; without it skewed loads drive the mean ever further
            from 0, and float32 then rounds the scores.
    """
    bias.add_(torch.sign(load.sum() - load * load.numel()).to(bias.dtype), alpha=lr)
    if centred:
        bias.sub_(bias.mean())


def _check(
    n_experts: int,
    top_k: int,
    d_expert: int,
    n_shared: int,
    n_routers: int,
    capacity_factor: float,
    backend: str,
) -> None:
    """Refuse sizes that cannot be built, naming the field; raises InputError."""
    counts = (
        ("n_experts", n_experts, 1), ("d_expert", d_expert, 1),
        ("n_shared", n_shared, 0), ("n_routers", n_routers, 1),
    )  # fmt: skip
    for name, value, least in counts:
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")
    if not 1 <= top_k <= n_experts:
        raise InputError(f"top_k={top_k}: must be 1 to n_experts={n_experts}")
    if not 0 <= capacity_factor < float("inf"):
        raise InputError(f"capacity_factor={capacity_factor}: must be above 0, or 0 for no limit")
    if backend not in BACKENDS:
        raise InputError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
