"""Routed experts on megablocks' dropless MLP, with our router's weights and choice.

megablocks (github.com/databricks/megablocks, read at 0.10) permutes, runs its grouped
GEMMs and adds up each token's weighted rows itself; its router, softmax only, is not used.
Its layer is built on the meta device and takes our parameters at each call: one set of
weights, the same checkpoint whatever the backend.

bfloat16 alone; a host sync at each call (it reads the token counts back); release 0.10
pins torch 2.7.0 and compiles a CUDA extension. Chosen only by name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.utils.errors import InputError

BLOCK = 128  # of megablocks' sparse matrices, which are sized even where they are not used


def build(moe: Any) -> nn.Module:
    """Build megablocks' ParallelDroplessMLP of the module's sizes, on the meta device."""
    n_experts, d_model, d_expert = moe.down.shape
    if n_experts * d_expert < BLOCK:
        raise InputError(
            f"d_expert={d_expert}: megablocks needs n_experts * d_expert of at least {BLOCK}; "
            "use wider experts or backend 'grouped_mm'"
        )
    try:
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import ParallelDroplessMLP

        arguments = Arguments(
            hidden_size=d_model, ffn_hidden_size=d_expert, bias=False, return_bias=False,
            activation_fn=F.silu, moe_num_experts=n_experts, moe_top_k=moe.top_k,
            # Its balancing loss grows a list in its module; ours is a bias.
            moe_loss_weight=0, mlp_type="glu", mlp_impl="grouped", fp16=False, bf16=True,
            device="meta",
        )  # fmt: skip
    except (ImportError, AssertionError) as missing:  # it asserts that grouped_gemm is installed
        raise InputError(
            f"backend='megablocks': cannot be used here ({missing}); install megablocks with its "
            "CUDA extension and grouped_gemm, or use backend 'grouped_mm'"
        ) from None
    return ParallelDroplessMLP(arguments)


def run(
    peer: nn.Module, moe: Any, x: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the experts; returns expert_out, slots and weights for `expert_combine`.

    x [N, d], weights float32 [N, k] and indices int32 [N, k] as routed -> expert_out [N, d],
    already weighted and added up over k: one row a token, with weight 1.
    """
    gate, up = moe.gate_up.to(x.dtype).chunk(2, dim=1)
    # [E, f, d] as its rows [E f, d]; down is stored in before out there.
    w2 = moe.down.to(x.dtype).mT
    borrowed = {
        f"mlp.{name}": w.reshape(-1, x.shape[1])
        for name, w in (("w1", gate), ("v1", up), ("w2", w2))
    }
    # Its kernels take the weights in float32, whatever the rows are.
    arguments = (x.contiguous()[None], None, weights, indices)
    rows = torch.func.functional_call(peer, borrowed, arguments)
    n_tokens = x.shape[0]
    slots = torch.arange(n_tokens, dtype=torch.int32, device=x.device)[:, None]
    return rows.view(x.shape), slots, weights.new_ones(n_tokens, 1)
