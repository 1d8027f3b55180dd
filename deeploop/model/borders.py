"""The borders of the loops: the start state, and all that happens between two loops.

    e = RMSNorm(e) * gain                               model.input_norm
    s = e, or noise                                     model.start
    for loop in range(R):
        s = s + sinusoid(loop)                          model.loop_signal
        s = inject(s, e)                                model.inject
        s = rule.start_loop(s, e); the K blocks
        s = RMSNorm(s) * final_gain                     model.loop_norm = each
    s = C s                                             model.readout_map
    s = RMSNorm(s) * final_gain, before the coda        model.loop_norm = last

A step is left out where its field is `none` or false.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.model.injection import injection
from deeploop.model.loop_signal import LoopModulation, Modulation, sinusoid
from deeploop.model.noise import truncated_normal
from deeploop.model.residual import Residual
from deeploop.model.state import LoopInputs, LoopState, Visit
from deeploop.model.sublayer import Sublayer
from deeploop.utils.device import autocast_dtype
from deeploop.utils.errors import InputError


class LoopBorders(nn.Module):
    """Start, injection, norms, signal and readout of the loops, with their weights."""

    def __init__(self, config: ModelConfig, rule: Residual):
        super().__init__()
        check_borders(config, rule)
        self.config, self.rule = config, rule
        self.injection = injection(config)
        self.modulation = LoopModulation(config) if config.loop_signal == "modulate" else None
        d = config.d_model
        self.norm_input = nn.RMSNorm(d) if config.input_norm else None
        self.readout = nn.Linear(d, d, bias=False) if config.readout_map else None

    def init_weights(self) -> None:
        """Fill the weights; called after every other initialisation, so that zeros stay zeros."""
        for module in (self.injection, self.modulation):
            if module is not None:
                module.init_weights()
        if self.readout is not None:
            nn.init.eye_(self.readout.weight)

    def undecayed(self) -> Iterable[nn.Parameter]:
        """Return the weights that weight decay leaves alone, beside gains."""
        return () if self.readout is None else self.readout.parameters()

    def figures(self) -> dict[str, Tensor]:
        """Return figures of the weights to log: scalars."""
        return {} if self.injection is None else self.injection.figures()

    @property
    def uses_input(self) -> bool:
        """Whether loops after the first read the loops' input e."""
        return reads_input(self.config, self.rule)

    def norms_after(self, last: bool) -> bool:
        """Return whether a loop's last visit norms for the visit after it (last: the last loop)."""
        c = self.config
        if last:
            return c.loop_norm == "none" and not c.readout_map
        changed = self.injection is not None or c.loop_norm == "each" or c.loop_signal == "add"
        return not (changed or self.rule.starts_fresh)

    def factors(self, loop: int) -> Sequence[Modulation | None]:
        """Return the factors of each sublayer of the core in a loop; None: no modulation."""
        none = [None] * (2 * self.config.n_layers)
        return none if self.modulation is None else self.modulation(loop)

    def input(self, s: LoopState) -> LoopState:
        """Norm the loops' input, which is the stream after the prelude, for input_norm."""
        if self.norm_input is None:
            return s
        return self._normed(s, self.norm_input.weight)

    def start(self, s: LoopState, position: int, keys: Tensor | None) -> LoopState:
        """Return the state before the first loop.

        Args:
            s: the loops' input as a state, h = e [B, T, d_model].
            position: of the first token in its sequence.
            keys: int64 [B], of the noise; None: 0 for each sequence.
        """
        c, e = self.config, s.h
        if c.start == "embedding":
            return s
        if keys is None:
            keys = torch.zeros(len(e), dtype=torch.int64, device=e.device)
        positions = range(position, position + e.shape[1])
        noise = truncated_normal(keys, positions, c.d_model, c.start_std)
        return s._replace(h=noise.to(e.dtype), n=None)

    def prepare(self, e: Tensor) -> Tensor:
        """Turn the loops' input e [B, T, d_model] into the summand that loops mix in."""
        return e if self.injection is None else self.injection.prepare(e)

    def start_loop(self, s: LoopState, inputs: LoopInputs, first: Visit) -> LoopState:
        """Mix in the loops' number and input, and norm for the loop's first visit.

        Args:
            s: state at the end of the loop before, or the start state.
            inputs: the loops' input; of all tokens, also where the state has some.
            first: the loop's first visit.
        """
        if self.config.loop_signal == "add":
            assert first.loop is not None
            s = s._replace(h=s.h + sinusoid(first.loop, s.h.shape[-1], like=s.h), n=None)
        if self.injection is not None:
            s = self.injection(s, inputs.of(inputs.x), first, norm=self.rule.norms_input)
        return self.rule.start_loop(
            s, inputs.of(inputs.e) if self.rule.uses_input else inputs.e, first
        )

    def end_loop(self, s: LoopState, gain: Tensor | None) -> LoopState:
        """Norm the stream itself at the end of a loop, for loop_norm=each; gain [d_model]."""
        return self._normed(s, gain) if self.config.loop_norm == "each" else s

    def after_loops(self, s: LoopState, gain: Tensor | None, coda: Sequence[Sublayer]) -> LoopState:
        """Bring the state to the coda or the head; with loop_norm the head takes the stream."""
        if self.readout is not None:
            s = s._replace(h=self.readout(s.h).to(s.h.dtype), n=None)
        if self.config.loop_norm == "none":
            if s.n is not None:
                return s
            n = self.rule.input(s.h, coda[0].gain_in if coda else gain)
        else:
            if self.config.loop_norm == "last":
                s = self._normed(s, gain)
            n = self.rule.input(s.h, coda[0].gain_in) if coda else s.h
        return s._replace(n=n.to(autocast_dtype(s.h)))

    def _normed(self, s: LoopState, gain: Tensor | None) -> LoopState:
        h = F.rms_norm(s.h, s.h.shape[-1:], gain, self.config.norm_eps)
        return s._replace(h=h, n=None)


def check_borders(config: ModelConfig, rule: Residual) -> None:
    """Refuse starts and injections that exclude each other or the rule; raises InputError."""
    name = config.residual
    if config.inject == "none":
        if config.start == "noise" and not rule.uses_input:
            raise InputError(
                "model.start=noise: needs model.inject, or the tokens would not reach the loops"
            )
    elif rule.uses_input:
        raise InputError(
            f"model.inject={config.inject}: the rule {name} injects the loops' input itself; "
            "leave model.inject out, or switch that off in the rule's fields"
        )
    elif rule.starts_fresh:
        raise InputError(
            f"model.inject={config.inject}: the rule {name} changes the stream at the start of a "
            "loop, too; switch that off in the rule's fields"
        )


def reads_input(config: ModelConfig, rule: Residual) -> bool:
    """Return whether loops after the first read the loops' input e."""
    return rule.uses_input or config.inject != "none"


def number_fields(config: ModelConfig, rule: Residual) -> str:
    """Return the fields, with values, by which a loop depends on its number; empty if by none."""
    c = config
    by = {
        f"model.residual={c.residual}": rule.counts_loops,
        f"model.inject={c.inject}": c.inject == "convex",
        f"model.inject={c.inject} with model.start={c.start}": c.inject == "add"
        and c.start == "embedding",
        f"model.loop_signal={c.loop_signal}": c.loop_signal != "none",
        "model.moe.router_per_loop=True": bool(c.moe.experts) and c.moe.router_per_loop,
        f"model.lora_rank={c.lora_rank}": bool(c.lora_rank),
    }
    return ", ".join(field for field, does in by.items() if does)
