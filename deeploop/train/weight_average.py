"""Keep an exponential moving average of a model's weights, for evaluation.

    a <- d a + (1 - d) w    after each optimizer step; a starts as the first weights

Source: TRM (arXiv 2510.04871), d = .999, without a correction for its start.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of a model's parameters; buffers, such as puzzle embeddings, are not averaged."""

    def __init__(self, model: nn.Module, decay: float):
        """Start from the model's weights as they are; `decay` is d, from 0 to 1."""
        self.decay = decay
        self.weights: dict[str, Tensor] = dict(model.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's weights into the average."""
        weights = list(self.weights.values())
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - self.decay)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context, and its own back after it.

        The parameters stay the same tensors: a compiled branch reads the new values.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self.weights.items():
            average = self.average[name]
            kept = p.clone()
            p.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the names of the parameters."""
        return dict(self.average)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy averages in; raises KeyError where the names are not those of the parameters."""
        if state.keys() != self.average.keys():
            raise KeyError(f"averages of other weights: {state.keys() ^ self.average.keys()}")
        for name, average in self.average.items():
            average.copy_(state[name])
