"""A moving average of the weights, which validation and the saved model's users may take.

    a <- decay a + (1 - decay) w     after each step, from the initial weights on

Source: TRM, arXiv 2510.04871 (decay 0.999).
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of a model's parameters; without decay there is none, and nothing is done.

    Buffers, such as a puzzle embedding or an expert's bias, are taken as they are.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        named = model.named_parameters() if decay else ()
        self.weights = {name: p for name, p in named}
        self.averages = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights."""
        if self.decay:
            torch._foreach_lerp_(
                list(self.averages.values()), list(self.weights.values()), 1 - self.decay
            )

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the averages as its weights, until the end of the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self.weights.items():
            kept = weight.clone()
            weight.copy_(self.averages[name])
            self.averages[name].copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by the names of the weights."""
        return dict(self.averages)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy averages that `tensors` returned."""
        for name, average in self.averages.items():
            average.copy_(tensors[name])
