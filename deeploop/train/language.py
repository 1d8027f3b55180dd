"""Train a language model (`deeploop.model.looplm`) on a text or a generated task."""

from typing import Any

import torch
from torch import Tensor

from deeploop.config.loop_count import loops_of_sequences
from deeploop.eval.generate import sample
from deeploop.model.looplm import LoopLM
from deeploop.model.noise import sequence_keys
from deeploop.model.state import Draws
from deeploop.train.backprop import MicroBatch
from deeploop.train.describe import describe
from deeploop.train.finite import stream_is_finite
from deeploop.train.held_out import held_out_figures, in_words
from deeploop.train.losses import loss_rule
from deeploop.train.metrics import StepMetrics, largest_rms
from deeploop.train.optim import learning_rate, make_optimizer
from deeploop.train.parents import Parents, load_teacher, start_from
from deeploop.train.step import train_step
from deeploop.train.trainer import Trainer
from deeploop.utils.device import autocast
from deeploop.utils.spans import span

SAMPLE_PROMPT, SAMPLE_TOKENS = 32, 200


class LanguageTrainer(Trainer):
    """A run of a LoopLM, a batch of fresh sequences in each step."""

    model: LoopLM

    def make(self) -> None:
        self.model = LoopLM(self.config.model).to(self.device)
        loss_rule(self.config.train).freeze_others(self.model)
        self.teacher: LoopLM | None = None
        self.optimizer = make_optimizer(self.model, self.config.train)
        if self.config.train.compile:
            # Branches only: updates are single kernels already, and no graph
            # then depends on the number of loops.
            for sublayer in self.model.all_sublayers():
                sublayer.branch.compile()

    def learn_from(self, parents: Parents) -> None:
        if parents.init is not None:
            start_from(self.config, parents.init, self.model)
        if parents.teacher is not None:
            self.teacher = load_teacher(self.config, parents.teacher, self.device)

    def describe(self) -> list[str]:
        return describe(self)

    def take_step(self, observe: bool = False) -> StepMetrics:
        with span("data"):
            micro_batches = self.micro_batches()
        lr = learning_rate(self.done, self.config.train)
        return train_step(
            self.model, self.optimizer, self.config, micro_batches, lr,
            step=self.done, ranks=self.ranks, observe=observe, teacher=self.teacher,
        )  # fmt: skip

    def micro_batches(self) -> list[MicroBatch]:
        """Return this rank's sequences of the next batch, and what is drawn for each, in pieces."""
        t, rows = self.config.train, self.sequences
        self.inputs, targets = self.batch()
        count = self.corpus.batch_targets(**self.next_batch())
        keys = first_loops = None
        if self.config.model.start == "noise":
            keys = sequence_keys(t.seed, self.done, rows)
        if t.loop_count_per == "sequence":
            drawn = torch.tensor(loops_of_sequences(t, self.config.model.loops, self.done))
            first_loops = (drawn.max() - drawn)[rows.start : rows.stop]

        def piece(x: Tensor | None, first: int) -> Tensor | None:
            return None if x is None else self.send(x[first : first + self.micro])

        return [
            MicroBatch(
                self.send(self.inputs[i : i + self.micro]),
                self.send(targets[i : i + self.micro]),
                Draws(piece(keys, i), piece(first_loops, i)),
                count,
            )
            for i in range(0, len(rows), self.micro)
        ]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return this rank's sequences of the next batch: tokens and targets, int64 [B, T]."""
        return self.corpus.batch(**self.next_batch(), rows=self.sequences)

    def last_inputs(self) -> Tensor:
        """Return the first micro-batch of the last step, of the next before any, on the device."""
        inputs = self.batch()[0] if self.inputs is None else self.inputs
        return inputs[: self.micro].to(self.device)

    def held_out_figures(self) -> dict[str, Any] | None:
        return held_out_figures(
            self.model, self.corpus, self.config, self.micro, self.ranks, self.stop_validation
        )

    def in_words(self, figures: dict[str, Any]) -> str:
        return in_words(figures)

    def step_in_words(self, figures: dict[str, Any]) -> list[str]:
        return [f"loss {figures['loss']:.4f}", f"rms {figures['residual_rms'][-1]:.2f}"]

    def forward_is_finite(self) -> Tensor:
        return stream_is_finite(self.model, self.last_inputs())

    def worst(self) -> str:
        return largest_rms(self.model, self.last_inputs())

    def samples(self) -> dict[str, Any]:
        return {"sample": self.sample()}

    def sample(self) -> str | None:
        """Continue held-out text with the model; None without a tokenizer."""
        tokenizer = self.corpus.tokenizer
        if tokenizer is None:
            return None
        length = min(SAMPLE_PROMPT, self.corpus.held_out_targets, self.config.model.seq_len)
        prompt, _ = next(self.corpus.held_out(1, length, length))
        self.model.eval()
        with autocast(self.device, self.config.train.precision):
            tokens = sample(self.model, prompt.to(self.device), SAMPLE_TOKENS, temperature=0.8)
        self.model.train()
        return tokenizer.decode(tokens[0].tolist())
