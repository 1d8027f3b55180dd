"""Validate a run: held-out loss, at the loops of training and at others, and answers of a task."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from deeploop.config import Config
from deeploop.config.loop_count import listed_loops
from deeploop.data.source import Source
from deeploop.eval.tasks import Matches
from deeploop.eval.validate import bits_per_byte, validate, validate_after
from deeploop.model.looplm import LoopLM
from deeploop.utils.distributed import Ranks


class HeldOut(NamedTuple):
    """The figures of a validation."""

    loss: float  # nats per target, at the loops of training
    figures: dict[str, Any]  # for metrics.jsonl and summary.json
    text: str  # for the log


def validate_run(
    model: LoopLM,
    config: Config,
    corpus: Source,
    batch: int,
    ranks: Ranks,
    stop: Callable[[int], bool],
) -> HeldOut | None:
    """Validate at the loops of training and, with train.eval_loops, at those; None if stopped.

    Args:
        batch: sequences per forward pass.
        ranks, stop: as for `deeploop.eval.validate.validate`.
    """
    t, loops = config.train, config.model.loops
    others = listed_loops(t.eval_loops, "train.eval_loops") if t.eval_loops else []
    matches = {n: Matches(model) for n in {*others, loops}} if corpus.answers else {}

    def observe(n: int, states: Tensor, targets: Tensor) -> None:
        if matches:
            matches[n](states, targets)

    def observe_trained(states: Tensor, targets: Tensor) -> None:
        observe(loops, states, targets)

    losses: dict[int, float] | None
    if others:
        losses = validate_after(
            model, corpus, [*others, loops], batch, t.precision, t.eval_tokens, ranks, stop, observe
        )
    else:
        loss = validate(
            model, corpus, batch, t.precision, t.eval_tokens, ranks, stop, observe_trained
        )
        losses = None if loss is None else {loops: loss}
    if losses is None:
        return None
    shares = {n: counted.shares(ranks) for n, counted in sorted(matches.items())}
    bits = bits_per_byte(losses[loops], corpus, t.eval_tokens)
    return _report(losses, shares, loops, others, bits)


def _report(
    losses: dict[int, float],
    shares: dict[int, tuple[float, float]],
    loops: int,
    others: list[int],
    bits: float | None,
) -> HeldOut:
    """Put the figures together.

    Args:
        losses: nats per target, by loops.
        shares: of exact examples and of right answers, by loops; empty for a text.
        loops, others: of training; of train.eval_loops.
        bits: the loss at the loops of training, in bits per byte; None where a text has no bytes.
    """
    loss = losses[loops]
    figures: dict[str, Any] = {"val_loss": loss, "val_bits_per_byte": bits}
    text = f"{loss:.4f}" + ("" if bits is None else f" ({bits:.3f} bits/byte)")
    by_loop = {n: f"{losses[n]:.3f}" for n in others}
    if shares:
        exact, token = shares[loops]
        figures |= {"val_accuracy": exact, "val_token_accuracy": token}
        text += f", accuracy {exact:.3f} ({token:.3f} of answers)"
        by_loop = {n: f"{shares[n][0]:.3f}" for n in others}
    if others:
        figures |= {"val_loops": others, "val_loop_losses": [losses[n] for n in others]}
        if shares:
            figures["val_loop_accuracies"] = [shares[n][0] for n in others]
        text += "; after loops " + ", ".join(f"{n}: {value}" for n, value in by_loop.items())
    return HeldOut(loss, figures, text)
