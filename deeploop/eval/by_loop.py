"""Measure a model after each of its loops on held-out text, in one pass.

Of each held-out target, after t = 1, 2, ... loops:

    loss       cross-entropy, nats
    right      1 where the likeliest token is the target
    entropy    of the distribution p_t of the next token, nats
    change     ||s_t - s_{t-1}|| / ||s_t|| of the residual stream            from t = 2 on
    kl         KL(p_t || p_{t-1}), nats                                      from t = 2 on
    switched   1 where the likeliest token is another one than after t - 1   from t = 2 on

and, for each rule by which a token could leave the loops, the mean of the loops it would take and
of its loss there. All tokens are computed in every loop: the tokens before one that leaves have
run as many loops as it has, which is not so where exits save time.

Sources: Huginn, arXiv 2502.05171 (exit at a KL under 5e-4; its code also has the change of the
state, .03, and the likeliest token); Ouro, arXiv 2510.25741 (the first loop at which the gate's
probabilities of having left add up to q).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.data.source import Source
from deeploop.eval.validate import bits_per_byte, held_out_targets, read_held_out, run_loops
from deeploop.model.depth.gate import log_exit_distribution
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import default_chunk_rows
from deeploop.model.state import LoopState

KL, CHANGE, UNCHANGED = 5e-4, 0.03, 2  # nats; of the stream; loops with the same likeliest token
QUANTILES = (0.5, 0.7, 0.9)


def measure_by_loop(
    model: LoopLM,
    corpus: Source,
    loops: int,
    batch: int,
    precision: str,
    tokens: int = 0,
) -> dict[str, Any]:
    """Return the figures after each of `loops` loops, means over held-out targets.

    Args:
        loops: to run, at least 1; may be other than in training.
        batch, precision, tokens: as for `deeploop.eval.validate.validate`.

    Returns:
        loss, bits_per_byte (None where the bytes are unknown), right, entropy, change, kl,
            switched: a list with a value for each loop, NaN where there is no loop before;
        exact, for a task: by loop the share of the examples whose answers are all right;
        exits: for each rule its name, mean loops, loss, and share of the tokens that left before
            the last loop;
        gate, for a depth rule with exit probabilities: p by loop, and the expected loop and loss;
        loops_taken, for a depth rule that chooses tokens: their mean, and the share of the tokens
            that took 0, 1, 2, ... loops.

    Raises:
        InputError: see `run_loops`.
    """
    sums = LoopSums(model, loops)
    read_held_out(model, corpus, batch, precision, sums.add, tokens)
    means = sums.means(held_out_targets(corpus, tokens))
    of_a_nat = bits_per_byte(1.0, corpus, tokens)
    bits = None if of_a_nat is None else [nats * of_a_nat for nats in means["loss"]]
    if not corpus.answers:
        del means["exact"]
    return means | {"bits_per_byte": bits}


class LoopSums:
    """Sums over targets of all figures, on the model's device in float64."""

    def __init__(self, model: LoopLM, loops: int):
        self.model, self.loops = model, loops
        self.by_loop: dict[str, Tensor] = {}  # [loops]
        self.exits: dict[str, Tensor] = {}  # [3]: loops, loss, tokens that left before the last
        self.gate: dict[str, Tensor] = {}
        self.taken: dict[str, Tensor] = {}  # histogram [loops + 1]
        self.examples: dict[str, Tensor] = {}  # exact [loops], and the number of examples

    def add(self, tokens: Tensor, targets: Tensor) -> None:
        """Add the figures of a batch: tokens and targets int64 [B, T]."""
        reader = Reader(self.model, tokens, targets)
        s = run_loops(self.model, tokens, self.loops, reader.read)
        keep = targets != IGNORE
        figures = {
            name: torch.stack([f[name] for f in reader.figures])[:, keep]
            for name in reader.figures[0]
        }
        for name, values in figures.items():
            accumulate(self.by_loop, name, values.double().sum(1))
        wrong = torch.stack([f["right"] == 0 for f in reader.figures]) & keep
        asked = keep.any(1)
        accumulate(self.examples, "exact", (asked & ~wrong.any(2)).double().sum(1))
        accumulate(self.examples, "count", asked.double().sum())
        leaving = training_free(figures)
        if reader.logits:
            p = log_exit_distribution(torch.stack(reader.logits)[:, keep]).exp()
            accumulate(self.gate, "p", p.double().sum(1))
            accumulate(self.gate, "loss", (p * figures["loss"]).double().sum())
            left = p.cumsum(0)
            leaving |= {f"gate, probability {q:g}": left >= q for q in QUANTILES}
        for name, met in leaving.items():
            accumulate(self.exits, name, leave(met, figures["loss"]))
        taken = self.model.depth.loops_taken(s)
        if taken is not None:
            counts = torch.bincount(taken[keep].long(), minlength=self.loops + 1)
            accumulate(self.taken, "shares", counts.double())

    def means(self, count: int) -> dict[str, Any]:
        """Return the means over `count` targets, as `measure_by_loop` does."""
        result: dict[str, Any] = {k: (v / count).tolist() for k, v in self.by_loop.items()}
        result["exact"] = (self.examples["exact"] / self.examples["count"]).tolist()
        means = {name: (v / count).tolist() for name, v in self.exits.items()}
        result["exits"] = [
            {"rule": name, "loops": loops, "loss": loss, "left": left}
            for name, (loops, loss, left) in means.items()
        ]
        if self.gate:
            p = (self.gate["p"] / count).tolist()
            expected = sum(t * x for t, x in enumerate(p, 1))
            loss = float(self.gate["loss"]) / count
            result["gate"] = {"p": p, "expected_loop": expected, "expected_loss": loss}
        if self.taken:
            shares = (self.taken["shares"] / count).tolist()
            mean = sum(t * x for t, x in enumerate(shares))
            result["loops_taken"] = {"mean": mean, "shares": shares}
        return result


def accumulate(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add a value to the sum of this name."""
    sums[name] = value + sums[name] if name in sums else value


class Reader:
    """The figures of a batch's tokens after each loop; of two loops, no more are alive."""

    def __init__(self, model: LoopLM, tokens: Tensor, targets: Tensor):
        self.model, self.tokens, self.targets = model, tokens, targets
        self.figures: list[dict[str, Tensor]] = []  # of each loop, by name [B, T]
        self.logits: list[Tensor] = []  # of each loop, of leaving there [B, T]
        self.h: Tensor | None = None  # stream after the loop before
        self.n: Tensor | None = None  # final state after it

    def read(self, t: int, s: LoopState) -> None:
        """Add the figures after t loops (`run_loops`)."""
        end = self.model.after_loops(s)
        logit = self.model.depth.exit_logit(end)
        if logit is not None:
            self.logits.append(logit)
        n = self.model.coda_output(end, self.tokens)
        figures = next_token_figures(n, self.n, self.model.head, self.targets)
        figures["change"] = relative_change(s.h, self.h)
        self.figures.append(figures)
        self.h, self.n = s.h, n


def next_token_figures(
    n: Tensor, before: Tensor | None, head: Tensor, targets: Tensor, chunk_rows: int | None = None
) -> dict[str, Tensor]:
    """Return loss, right, entropy, kl and switched of each token, with logits of a chunk at once.

    Args:
        n: final states [B, T, d_model], any float dtype; the GEMMs run in it.
        before: those of the loop before; None: kl and switched are NaN.
        head: [vocab_size, d_model].
        targets: int64 [B, T]; the loss is 0 where IGNORE.
        chunk_rows: tokens of a chunk; by default as `deeploop.model.loss`.

    Returns:
        By name [B, T], float32, or float64 where n is.
    """
    w, shape, target = head.to(n.dtype), targets.shape, targets.reshape(-1)
    rows = chunk_rows or default_chunk_rows(n, head)
    chunks: list[Tensor] = []
    for start in range(0, len(target), rows):
        chunk = slice(start, start + rows)
        now = log_probabilities(n, w, chunk)
        p = now.exp()
        loss = F.nll_loss(now, target[chunk], ignore_index=IGNORE, reduction="none")
        entropy, likeliest = -(p * now).sum(-1), now.argmax(-1)
        right = (likeliest == target[chunk]).to(loss.dtype)
        kl = switched = torch.full_like(loss, torch.nan)
        if before is not None:
            then = log_probabilities(before, w, chunk)
            kl = (p * (now - then)).sum(-1)
            switched = (likeliest != then.argmax(-1)).to(loss.dtype)
        chunks.append(torch.stack([loss, right, entropy, kl, switched]))
    values = torch.cat(chunks, 1).view(5, *shape)
    return dict(zip(("loss", "right", "entropy", "kl", "switched"), values, strict=True))


def log_probabilities(n: Tensor, w: Tensor, chunk: slice) -> Tensor:
    """Return the log-probabilities of the next token [rows, vocab_size], at least float32."""
    logits = F.linear(n.reshape(-1, n.shape[-1])[chunk], w)
    return logits.to(torch.promote_types(n.dtype, torch.float32)).log_softmax(-1)


def relative_change(h: Tensor, before: Tensor | None) -> Tensor:
    """Return ||h - before|| / ||h|| of each token: streams [B, T, d_model] -> [B, T].

    NaN where before is None; 0 where neither differs from 0.
    """
    if before is None:
        return torch.full_like(h[..., 0], torch.nan)
    tiny = torch.finfo(h.dtype).tiny
    return (h - before).norm(dim=-1) / h.norm(dim=-1).clamp_min(tiny)


def training_free(figures: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return, for each rule that needs no training, where it would let a token leave.

    Args:
        figures: by name [loops, tokens]; NaN in the first loop, where no rule is met.

    Returns:
        By the rule's name, bool [loops, tokens].
    """
    same = figures["switched"] == 0
    unchanged = same.clone()
    for back in range(1, UNCHANGED):
        unchanged[back:] &= same[:-back]
        unchanged[:back] = False
    return {
        f"KL under {KL:g}": figures["kl"] < KL,
        f"change under {CHANGE:g}": figures["change"] < CHANGE,
        f"same token for {UNCHANGED} loops": unchanged,
    }


def leave(met: Tensor, loss: Tensor) -> Tensor:
    """Return what tokens that leave at the first loop at which a rule is met add up to.

    Args:
        met: bool [loops, tokens]; a token for which it never is leaves after the last loop.
        loss: [loops, tokens].

    Returns:
        float64 [3]: the loops taken, the losses there, the tokens that left before the last loop.
    """
    met = met.clone()
    met[-1] = True
    first = met.int().argmax(0)
    at_exit = loss.gather(0, first[None])
    early = first < len(met) - 1
    return torch.stack([x.double().sum() for x in (first + 1, at_exit, early)])
