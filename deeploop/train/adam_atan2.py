"""AdamATan2: Adam without an epsilon, its update bounded by an angle.

    w <- w (1 - lr decay) - lr / (1 - b1^t) atan2(m, sqrt(v / (1 - b2^t)))

m and v are Adam's moments, m <- b1 m + (1 - b1) g and v <- b2 v + (1 - b2) g^2. The update does
not change with the gradient's scale, and no entry of it exceeds pi/2 lr / (1 - b1^t). This is the
form of the optimizer that HRM and TRM were trained with: the first moment's correction is outside
of the angle, and no factors are added to it.

Sources: arXiv 2407.05872 (atan2 in the place of the quotient); HRM, arXiv 2506.21734.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamATan2(torch.optim.Optimizer):
    """Adam with atan2 and decoupled weight decay, in pure PyTorch over lists of tensors.

    The state of a parameter is that of torch.optim.AdamW: step, exp_avg, exp_avg_sq. Where the
    attribute `found_inf`, a scalar on the device, is not 0, `step` changes nothing but non-finite
    gradients, which become 0; the host does not wait for it.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step of every parameter that has a gradient; a closure is not taken."""
        if closure is not None:
            raise TypeError("AdamATan2.step takes no closure")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step(params, **{k: group[k] for k in ("lr", "betas", "weight_decay")})

    def _step(
        self, params: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        grads, takes = [p.grad for p in params if p.grad is not None], self._takes(params)
        m, v, steps = self._moments(params)

        def scale_(tensors: list[Tensor], factor: Tensor) -> None:
            torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))

        torch._foreach_add_(steps, [takes] * len(steps))  # one scalar tensor would be read back
        for decay, moment in zip(betas, (m, v), strict=True):
            scale_(moment, 1 - takes * (1 - decay))
        torch._foreach_add_(m, grads, alpha=1 - betas[0])
        torch._foreach_addcmul_(v, grads, grads, value=1 - betas[1])
        # A skipped first step leaves t = 0, and its update is multiplied by 0.
        t = torch.stack(steps).double().clamp(min=1)
        first, second = (1 - beta**t for beta in betas)
        update = torch._foreach_sqrt(v)
        torch._foreach_div_(update, list(second.sqrt().unbind()))
        for exp_avg, angle in zip(m, update, strict=True):
            torch.atan2(exp_avg, angle, out=angle)
        torch._foreach_mul_(update, list((takes * lr / first).unbind()))
        scale_(params, 1 - lr * weight_decay * takes)
        torch._foreach_sub_(params, update)

    def _takes(self, params: list[Tensor]) -> Tensor:
        """Return 1, or 0 where the step is skipped: a float64 scalar; its gradients are then 0."""
        device = params[0].device
        if self.found_inf is None:
            return torch.ones((), dtype=torch.float64, device=device)
        skip = self.found_inf.to(device) != 0
        for p in params:
            assert p.grad is not None
            p.grad.masked_fill_(skip, 0.0)
        return (~skip).double()

    def _moments(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        names = ("exp_avg", "exp_avg_sq", "step")
        m, v, steps = ([self.state[p][name] for p in params] for name in names)
        return m, v, steps
