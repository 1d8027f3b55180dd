"""Validate a run: held-out loss, that after other numbers of loops, and a task's right answers."""

from typing import Any

from torch import Tensor

from deeploop.config import Config
from deeploop.config.loop_count import listed_loops
from deeploop.data.source import Source
from deeploop.eval.tasks import Matches
from deeploop.eval.validate import Stop, bits_per_byte, validate, validate_after
from deeploop.model.looplm import LoopLM
from deeploop.utils.distributed import Ranks


def held_out_figures(
    model: LoopLM, corpus: Source, config: Config, batch: int, ranks: Ranks, stop: Stop
) -> dict[str, Any] | None:
    """Return a validation's figures as metrics.jsonl has them; None where `stop` ended it.

    batch: sequences at once; the others are those of `validate`.
    """
    t, own = config.train, config.model.loops
    wanted = listed_loops(t.eval_loops, "train.eval_loops") if t.eval_loops else []
    counts = {n: Matches(model) for n in sorted({own, *wanted})} if corpus.answers else {}
    given = batch, t.precision, t.eval_tokens, ranks, stop

    def count(loops: int, n: Tensor, targets: Tensor) -> None:
        if counts:
            counts[loops](n, targets)

    losses: dict[int, float] | None
    if wanted:
        losses = validate_after(model, corpus, [own, *wanted], *given, count)
    else:
        loss = validate(model, corpus, *given, counts.get(own))
        losses = None if loss is None else {own: loss}
    if losses is None:
        return None
    bits = bits_per_byte(losses[own], corpus, t.eval_tokens)
    figures: dict[str, Any] = {"val_loss": losses[own], "val_bits_per_byte": bits}
    shares = {n: matches.shares(ranks) for n, matches in counts.items()}
    if shares:
        exact, token = shares[own]
        figures |= {"val_accuracy": exact, "val_token_accuracy": token}
    if wanted:
        figures |= {"val_loops": wanted, "val_loop_losses": [losses[n] for n in wanted]}
    if wanted and shares:
        figures["val_loop_accuracies"] = [shares[n][0] for n in wanted]
    return figures


def in_words(figures: dict[str, Any]) -> str:
    """Return the figures of `held_out_figures` as a line of the log has them."""
    line = f"held-out loss {figures['val_loss']:.4f}"
    if (bits := figures["val_bits_per_byte"]) is not None:
        line += f" ({bits:.3f} bits/byte)"
    if "val_accuracy" in figures:
        exact, token = figures["val_accuracy"], figures["val_token_accuracy"]
        line += f", accuracy {exact:.3f} ({token:.3f} of answers)"
    if loops := figures.get("val_loops"):
        by_loops = figures.get("val_loop_accuracies", figures["val_loop_losses"])
        pairs = zip(loops, by_loops, strict=True)
        line += "; after loops " + ", ".join(f"{n}: {value:.3f}" for n, value in pairs)
    return line
