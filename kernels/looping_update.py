"""looping_update: LOOM's attention branch, two moving averages and the next visit's norm.

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

**The closed form.** As both memories decay alike and take the same c * f, after
layer l of loop t G is b^l * G_{t-1} + L_l, G_{t-1} being G at the end of the loop
before. So inside a loop only L needs writing:

    h' = h + (b^l / D_G) * G_{t-1} + (1 / D_G + 1 / D_L) * L_l

`looping_update` does that, with the two factors from `looping_coefficients`;
`looping_carry` makes G_t = b^M * G_{t-1} + L_M once per loop. `looping_update_two`
writes both memories at every layer, for either reading of G.

Backward, kernels and rounding are those of linear_update: the map is linear
before the norm, so only h' and one number per row are saved. h' has the dtype of
h and n that of f; a new memory has that of the one before it.

Bytes, in passes over [rows, d] (beside O(rows) statistics and O(d) gains), for
l > 1 and t > 1; a memory that is not there is not read:

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

from deeploop.errors import InputError

from . import rows
from .linear_update import linear_update
from .triton import linear_update as linear_kernels
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
) -> tuple[Tensor, Tensor, rows.Normed]:
    """h', L', n from the closed form (n is None where norm is off).

    local is L after the layer before (None in the first layer of a loop) and glob
    G at the end of the loop before (None in the first loop). L' has the dtype of
    local, else of glob, else memory_dtype (default float32).
    """
    _check("looping_update", h, f, local, glob, w_next, norm)
    rows.check_untraced(
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
) -> tuple[Tensor, Tensor, Tensor, rows.Normed]:
    """h', L', G', n with both memories written (n is None where norm is off).

    local and glob are the memories after the layer before (None: not started).
    source says what G takes: "output" is c * f (the paper), "readout" the local
    readout L' * read_local (the released code). The factors are 1 / D_L and
    1 / D_G, from `two_memory_coefficients`.
    """
    _check("looping_update_two", h, f, local, glob, w_next, norm)
    rows.check_untraced(
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
    """G_t = b^M * G_{t-1} + L_M, at the end of a loop; glob is None after the first."""
    return local.clone() if glob is None else torch.add(local, glob, alpha=decay**n_layers)


# ---------------------------------------------------------------------------
# Coefficients


def two_memory_coefficients(
    loop: int, layer: int, n_layers: int, decay: float
) -> tuple[float, float]:
    """1 / D_L and 1 / D_G for a layer and a loop counted from 1."""
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
    """read_local and read_global of `looping_update` for a layer and a loop counted from 1."""
    by_local, by_global = two_memory_coefficients(loop, layer, n_layers, decay)
    return by_local + by_global, decay**layer * by_global


def _weight(count: int, decay: float) -> float:
    """1 + b + ... + b^(count - 1); summed, as the quotient loses digits near b = 1."""
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
    rows.check_rows(op, h=h, f=f, **{k: x for k, x in memories.items() if x is not None})
    rows.check_gains(op, h, w_next=w_next)
    rows.check_norm(op, norm, w_next)


def _memory_dtype(
    h: Tensor, f: Tensor, own: Tensor | None, other: Tensor | None, default: torch.dtype | None
) -> torch.dtype:
    """Of a new memory: that of the one before it, else of the other one, else the default."""
    for memory in (own, other):
        if memory is not None:
            return memory.dtype
    return default or rows.compute_dtype(h, f)


def aot_launches(
    x: Tensor, w: Tensor | None, config: rows.Config | None = None
) -> dict[str, rows.Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    launches = functools.partial(linear_kernels.aot_launches, config=config)
    found = launches("looping_update", x, w, local=x, glob=x)
    found |= launches("looping_update_two", x, w, local=x, glob=x, two=True)
    if x.dtype != torch.float32:
        wide = torch.empty_like(x, dtype=torch.float32)
        found |= launches("looping_two_fp32", x, w, local=wide, glob=wide, two=True)
    return found
