"""AdamATan2: Adam with atan2 in the place of the division, and no epsilon.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    w <- (1 - lr decay) w - lr atan2(m / (1 - b1^t), sqrt(v / (1 - b2^t)))

A step is at most lr pi/2, whatever the gradient's scale. Source: arXiv 2407.05872, section 3.4,
without that paper's constants; HRM and TRM train with it. (lucidrains' package multiplies by 1.27.)
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AdamATan2(torch.optim.Optimizer):
    """Adam with atan2, in PyTorch's operators over lists of tensors.

    Args:
        params: parameters, or groups with a weight_decay each.
        lr: learning rate.
        betas: decay of the two moments.

    A step in which `found_inf`, a tensor, is 1 leaves weights and moments as they are, without the
    host waiting for the device.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.95)
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step(params, group)

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state(p) for p in params]
        steps, m, v = ([s[k] for s in states] for k in ("step", "exp_avg", "exp_avg_sq"))
        (b1, b2), lr = group["betas"], group["lr"]
        taken = torch.ones((), device=params[0].device)
        g = [p.grad for p in params if p.grad is not None]
        if self.found_inf is not None:  # a NaN stays NaN when multiplied by 0
            taken = 1 - self.found_inf.to(taken)
            g = [x.where(taken > 0, 0) for x in g]
        for step in steps:
            step.add_(taken)
        squares = list(torch._foreach_mul(g, g))
        for moment, values, b in ((m, g, b1), (v, squares, b2)):
            torch._foreach_mul_(moment, 1 - (1 - b) * taken)
            torch._foreach_add_(moment, list(torch._foreach_mul(values, (1 - b) * taken)))
        t = steps[0]  # the same for all
        mean = torch._foreach_div(m, 1 - b1**t)
        scale = torch._foreach_sqrt(torch._foreach_div(v, 1 - b2**t))
        updates = [torch.atan2(a, b) for a, b in zip(mean, scale, strict=True)]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"] * taken)
        torch._foreach_mul_(updates, -lr * taken)
        torch._foreach_add_(params, updates)

    def _state(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state
