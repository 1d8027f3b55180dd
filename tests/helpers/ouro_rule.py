"""A residual rule that the package does not have: Ouro's h + RMSNorm(f) (arXiv 2510.25741)."""

import torch.nn.functional as F

from deeploop.kernels import branch_sandwich
from deeploop.model.moe.layer import combine
from deeploop.model.residual import Residual


class OuroRule(Residual):
    """h' = h + RMSNorm(f) * gain_out."""

    def gains(self, kind):
        return True, True

    def describe(self):
        return "peri-norm"

    def __call__(self, s, f, visit):
        gain = visit.sublayer.gain_out
        h, n = branch_sandwich(
            s.h, combine(f), gain, visit.next_gain, 1.0, self.eps, norm=visit.norm
        )
        return s._replace(h=h, n=n)

    def reference(self, s, f, visit):
        return s._replace(h=s.h + F.rms_norm(f, f.shape[-1:], visit.sublayer.gain_out, self.eps))
