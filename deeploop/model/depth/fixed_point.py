"""fixed_point: the loops look for a state s with f(s) = s, f being one loop (deep equilibrium).

Without gradient the loops that are given are the most evaluations of f that a solver may take
(`deeploop.model.depth.solvers`). With gradient they are damped steps

    s <- tau f(s) + (1 - tau) s

so that train.backprop = last(k) finds a fixed point with R - k evaluations at most, and
differentiates k steps from there: k = 1 and tau = 1 is the one-step gradient (JFB), k > 1 the
phantom gradient. train.backprop = full unrolls damped steps alone.

f is the same in every loop, so that no rule or injection may depend on the loop's number, and its
state is the stream alone. Each token has its own end, and the others still attend to one that is
at rest, by the keys and values of that state. With a cache every loop is run, as each has its
keys and values there: cache on is cache off. (A residual within rounding of the tolerance may end
a token one evaluation apart.)

Sources: arXiv 1909.01377 (DEQ), 2103.12803 (JFB), 2111.05177 (phantom gradients).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from deeploop.config import ModelConfig
from deeploop.model.borders import number_fields, reads_input
from deeploop.model.depth.base import Depth, OnLoop, RunLoop
from deeploop.model.depth.solvers import Solution, anderson, plain, relative_residual
from deeploop.model.residual import residual_rule
from deeploop.utils.errors import InputError

if TYPE_CHECKING:
    from deeploop.model.state import LoopInputs, LoopState


class Solved(NamedTuple):
    """How near each token is to its fixed point."""

    residual: Tensor  # [B, T] |f(s) - s| / (1e-5 + |f(s)|) in the newest evaluation that counts
    evaluations: Tensor | None = None  # int64 [B, T], the solver's; None: no solver has run


class FixedPoint(Depth):
    """Solve for a fixed point without gradient, take damped steps with gradient."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        rule = residual_rule(config)
        if not reads_input(config, rule):
            raise InputError(
                f"model.depth={config.depth}: needs model.inject, or its fixed point would not "
                "depend on the tokens"
            )
        if fields := number_fields(config, rule):
            raise InputError(
                f"model.depth={config.depth}: needs loops that do not depend on their number; "
                f"change {fields}"
            )

    def run(
        self,
        s: LoopState,
        loops: range,
        run_loop: RunLoop,
        inputs: LoopInputs,
        on_loop: OnLoop | None = None,
    ) -> LoopState:
        run = self.damped_steps if torch.is_grad_enabled() else self.solve
        return run(s, loops, run_loop, inputs, on_loop)

    def damped_steps(
        self,
        s: LoopState,
        loops: range,
        run_loop: RunLoop,
        inputs: LoopInputs,
        on_loop: OnLoop | None,
    ) -> LoopState:
        """Take a step in each loop: s <- tau f(s) + (1 - tau) s."""
        tau = self.config.solver.damping
        evaluations = None if s.depth is None else s.depth.evaluations
        for loop in loops:
            after = self.evaluate(s, loop, run_loop, inputs)
            solved = Solved(relative_residual(s.h, after.h), evaluations)
            if tau != 1:
                after = after._replace(h=torch.lerp(s.h, after.h, tau), n=None)
            s = after._replace(depth=solved)
            if on_loop is not None:
                on_loop(s)
        return s

    def solve(
        self,
        s: LoopState,
        loops: range,
        run_loop: RunLoop,
        inputs: LoopInputs,
        on_loop: OnLoop | None,
    ) -> LoopState:
        """Let the solver evaluate f in some loops; `on_loop` is called for all."""
        c, remaining, last = self.config.solver, iter(loops), s

        def f(h: Tensor) -> Tensor:
            nonlocal last
            last = self.evaluate(last._replace(h=h, n=None), next(remaining), run_loop, inputs)
            return last.h

        def after(found: Solution) -> LoopState:
            n = last.n if found.state is last.h else None
            solved = Solved(found.residual, found.evaluations)
            return last._replace(h=found.state, n=n, depth=solved)

        def on_evaluation(found: Solution) -> None:
            if on_loop is not None:
                on_loop(after(found))

        budget, end = len(loops), inputs.cached
        if c.method == "anderson":
            found = anderson(
                f, s.h, budget, c.tolerance, c.memory, to_the_end=end, on_evaluation=on_evaluation
            )
        else:
            found = plain(f, s.h, budget, c.tolerance, end, on_evaluation)
        for _ in remaining:
            on_evaluation(found)
        return after(found)

    def evaluate(self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs) -> LoopState:
        """Return the state after a loop; raises InputError where it is more than the stream."""
        after = run_loop(s, loop, inputs)
        if after.memory is not None:
            raise InputError(
                f"model.depth={self.config.depth}: needs a rule without tensors of its own between "
                f"loops (model.residual={self.config.residual})"
            )
        return after

    def loops_taken(self, s: LoopState) -> Tensor | None:
        return s.depth.evaluations

    def figures(self, s: LoopState) -> dict[str, Tensor]:
        residual, evaluations = s.depth
        figures = {"fixed_point_residual": residual.mean()}
        if evaluations is not None:
            figures["solver_loops"] = evaluations.float().mean()
        return figures
