"""looping_update: LOOM's attention branch, two moving averages and the next sublayer's norm.

Each attention branch f of a looped model adds to two memories that decay by b: a
local one L, over the layers of this loop, and a global one G, over all loops. The
stream reads both, each divided by its sum of weights D. For layer l (from 1) of
loop t (from 1), with M attention layers per loop and c the branch scale:

    L_l = b * L_{l-1} + c * f     L_0 = 0 in every loop
    G   = b * G       + c * f     G = 0 before the first loop only
    h'  = h + L_l / D_L + G / D_G
    n   = RMSNorm(h') * w_next

    D_L = 1 + b + ... + b^(l-1)   D_G = 1 + b + ... + b^((t-1) * M + l - 1)

The released code differs in one point: G takes the local readout L_l / D_L where
the paper takes c * f.

**The closed form.** Both memories decay by b and take the same c * f. So after layer l
of loop t, G is b^l * G_{t-1} + L_l, where G_{t-1} is G at the end of the previous
loop, and inside a loop only L needs writing:

    h' = h + (b^l / D_G) * G_{t-1} + (1 / D_G + 1 / D_L) * L_l

`looping_update` computes this, with the two factors from `looping_coefficients`;
`looping_carry` computes G_t = b^M * G_{t-1} + L_M once per loop. `looping_update_two`
writes both memories at every layer and supports both definitions of G.

Backward, kernels and rounding are those of linear_update: the map is linear
before the norm, so h', w_next and one number per row are saved. h' has the dtype of
h and n that of f; a new memory has the dtype of the previous one.

Bytes, in passes over [rows, d] (plus O(rows) statistics and O(d) gains), for
l > 1 and t > 1; a memory that is None is not read:

    looping_update      forward 7 (reads h, f, L, G; writes h', L', n)
                        backward 8 (reads dh', dL', dn, h'; writes dh, df, dL, dG)
    looping_update_two  forward 8 (also writes G'), backward 9 (also reads dG')

Without the norm forward is one pass less and backward two. Speed on a GPU: not
yet measured.

Source: arXiv 2610.01153 (LOOM); the closed form is ours.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from deeploop.utils.errors import InputError

from . import _aten
from ._checks import check_gains, check_norm, check_rows, check_untraced
from ._launch import Launch, LaunchConfig
from ._op import Normed
from .linear_update import linear_update
from .triton import linear_update as triton_code
from .triton.linear_update import Coefficients


def looping_update(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    *,
    scale: float,
    decay: float,
    read_local: float,
    read_global: float,
    eps: float = 1e-6,
    norm: bool = True,
    memory_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Normed]:
    """Update LOOM's local memory and the stream by the closed form, and norm the stream.

    L' = decay * L + scale * f,  h' = h + read_local * L' + read_global * G,
    n = RMSNorm(h') * w_next.

    Args:
        h: residual stream, [..., d], a float dtype.
        f: branch output, like h; may have another float dtype.
        local: L after the previous layer, like h, or None in the first layer of a loop.
        glob: G at the end of the previous loop, like h, or None in the first loop.
        w_next: gain of the next sublayer's norm, [d], or None for ones.
        scale: c, the factor of the branch.
        decay: b, the factor of the memories.
        read_local, read_global: factors from `looping_coefficients`. All four are run-time
            numbers: no value compiles the kernel again.
        eps: added to the mean square under the root.
        norm: False leaves the norm out; w_next must then be None.
        memory_dtype: dtype of L' if there is no memory yet (default: float32, or float64
            if h or f is).

    Returns:
        h', dtype of h; L', dtype of local, else of glob, else memory_dtype; n, dtype of f
        (None if norm is False). All have the shape of h.

    Raises:
        InputError: if shapes, dtypes or devices disagree, or a number is not finite.

    Source: LOOM (arXiv 2610.01153); the closed form is derived in this module's docstring.
    """
    _check("looping_update", h, f, local, glob, w_next, norm)
    check_untraced(
        "looping_update", eps, scale=scale, decay=decay,
        read_local=read_local, read_global=read_global,
    )  # fmt: skip
    k = Coefficients(c=scale, b=decay, u=read_local, g=1.0, v=read_global)
    dtype = _memory_dtype(h, f, local, glob, memory_dtype)
    h_new, local_new, _, n = linear_update(
        h, f, local, glob, w_next, k, eps, norm, local_dtype=dtype
    )
    return h_new, local_new, n


def looping_update_two(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    *,
    scale: float,
    decay: float,
    read_local: float,
    read_global: float,
    source: Literal["output", "readout"] = "output",
    eps: float = 1e-6,
    norm: bool = True,
    memory_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Normed]:
    """Update both of LOOM's memories and the stream, and norm the stream.

    L' = decay * L + scale * f,  G' = decay * G + o,  h' and n as in `looping_update`.

    Args:
        h, f, w_next, scale, decay, eps, norm, memory_dtype: as in `looping_update`.
        local: L after the previous layer, like h, or None in the first layer of a loop.
        glob: G after the previous layer, like h, or None in the first layer of the model.
        read_local, read_global: 1 / D_L and 1 / D_G, from `two_memory_coefficients`.
        source: the term o that G accumulates: "output" is scale * f (the paper), "readout"
            is read_local * L' (the released code).

    Returns:
        h', dtype of h; L' and G', each in the dtype of its previous value, else of the
        other memory, else memory_dtype; n, dtype of f (None if norm is False). All have
        the shape of h.

    Raises:
        InputError: if shapes, dtypes or devices disagree, a number is not finite, or
            source is unknown.

    Source: LOOM (arXiv 2610.01153) and its released code.
    """
    _check("looping_update_two", h, f, local, glob, w_next, norm)
    check_untraced(
        "looping_update_two", eps, scale=scale, decay=decay,
        read_local=read_local, read_global=read_global,
    )  # fmt: skip
    if source not in ("output", "readout"):
        raise InputError(
            f"looping_update_two: source is {source!r}; allowed: 'output' or 'readout'"
        )
    k = Coefficients(
        c=scale, b=decay, u=read_local, v=read_global, g=decay,
        e=scale if source == "output" else 0.0, q=read_local if source == "readout" else 0.0,
    )  # fmt: skip
    local_dtype = _memory_dtype(h, f, local, glob, memory_dtype)
    glob_dtype = _memory_dtype(h, f, glob, local, memory_dtype)
    return linear_update(
        h, f, local, glob, w_next, k, eps, norm, local_dtype=local_dtype, glob_dtype=glob_dtype
    )


def looping_carry(glob: Tensor | None, local: Tensor, n_layers: int, decay: float) -> Tensor:
    """Carry the global memory over the end of a loop: G_t = b^M * G_{t-1} + L_M.

    Args:
        glob: G_{t-1}, [..., d], or None after the first loop.
        local: L_M, the local memory after the loop's last attention layer, like glob.
        n_layers: M, attention layers per loop.
        decay: b.

    Returns:
        G_t, like local; a new tensor.
    """
    return local.clone() if glob is None else torch.add(local, glob, alpha=decay**n_layers)


# ---------------------------------------------------------------------------
# Coefficients


def two_memory_coefficients(
    loop: int, layer: int, n_layers: int, decay: float
) -> tuple[float, float]:
    """Compute read_local = 1 / D_L and read_global = 1 / D_G of `looping_update_two`.

    Args:
        loop: t, counted from 1.
        layer: l, the attention layer within the loop, 1 to n_layers.
        n_layers: M, attention layers per loop.
        decay: b, 0 to 1.

    Raises:
        InputError: if a number is out of range.
    """
    allowed = {
        "loop": (loop, loop >= 1, "1 or more"),
        "layer": (layer, 1 <= layer <= n_layers, f"1 to n_layers, {n_layers}"),
        "decay": (decay, 0 <= decay <= 1, "0 to 1"),
    }
    for name, (value, fits, words) in allowed.items():
        if not fits:
            raise InputError(f"looping_coefficients: {name} is {value}; allowed: {words}")
    return 1 / _weight(layer, decay), 1 / _weight((loop - 1) * n_layers + layer, decay)


def looping_coefficients(loop: int, layer: int, n_layers: int, decay: float) -> tuple[float, float]:
    """Compute read_local and read_global of `looping_update`; arguments as above.

    Returns 1 / D_L + 1 / D_G and b^l / D_G. Raises InputError if a number is out of range.
    """
    by_local, by_global = two_memory_coefficients(loop, layer, n_layers, decay)
    return by_local + by_global, decay**layer * by_global


def _weight(count: int, decay: float) -> float:
    """Sum 1 + b + ... + b^(count - 1); the closed quotient loses digits near b = 1."""
    return sum(decay**i for i in range(count))


# ---------------------------------------------------------------------------
# Checks


def _check(
    op: str,
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    norm: bool,
) -> None:
    memories = {"local": local, "glob": glob}
    check_rows(op, h=h, f=f, **{k: x for k, x in memories.items() if x is not None})
    check_gains(op, h, w_next=w_next)
    check_norm(op, norm, w_next)


def _memory_dtype(
    h: Tensor, f: Tensor, previous: Tensor | None, other: Tensor | None, default: torch.dtype | None
) -> torch.dtype:
    """Dtype of a new memory: that of its previous value, else of the other, else the default."""
    for memory in (previous, other):
        if memory is not None:
            return memory.dtype
    return default or _aten.compute_dtype(h, f)


def aot_launches(
    x: Tensor, w: Tensor | None, config: LaunchConfig | None = None
) -> dict[str, Launch]:
    """Build every launch of the op, by name, on rows like x and gains like w (meta tensors)."""
    build = functools.partial(triton_code.aot_launches, config=config)
    launches = build("looping_update", x, w, local=x, glob=x)
    launches |= build("looping_update_two", x, w, local=x, glob=x, two=True)
    if x.dtype != torch.float32:
        wide = torch.empty_like(x, dtype=torch.float32)
        launches |= build("looping_two_fp32", x, w, local=wide, glob=wide, two=True)
    return launches
