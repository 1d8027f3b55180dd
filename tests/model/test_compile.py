"""torch.compile of a whole model: one graph, the same numbers, a graph for each loop count."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deeploop.config import LoomConfig, ModelConfig, MoEConfig
from deeploop.model.looplm import LoopLM

EXPERTS = MoEConfig(experts=4, top_k=2, d_expert=8, shared=1, capacity_factor=1.0)
MODELS = {
    "deeploop": {},
    "deeploop, adapters": {"lora_rank": 4},
    "deeploop, experts": {"moe": EXPERTS},
    "loom": {"residual": "loom", "moe": EXPERTS},
    "native loom": {
        "residual": "loom",
        "moe": MoEConfig(experts=4, top_k=2, d_expert=8, shared=0, router_per_loop=False),
        "loom": LoomConfig(looping_residual=False, injection=False, branch_norm=False),
    },
}


def tokens(batch, length=8):
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(1))


def results(run, model, x, loops):
    """Final states and the gradients of all parameters."""
    n = run(x, loops)
    direction = torch.randn(n.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((n * direction).sum(), model.parameters(), allow_unused=True)
    return n.detach(), grads


def compiled(name, backend="eager", **fields):
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_layers": 1, "loops": 2, "n_heads": 2, "seq_len": 8, "vocab_size": 31}
    model = LoopLM(ModelConfig(**sizes | fields | MODELS[name]))
    counter = CompileCounterWithBackend(backend)
    return model, torch.compile(model, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_is_one_graph_for_each_loop_count(name):
    model, graph, counter = compiled(name)
    x = tokens(2)
    for loops in (1, 2, 1):
        torch.testing.assert_close(results(graph, model, x, loops), results(model, model, x, loops))
    assert counter.frame_count == 2
    if name not in ("deeploop", "loom"):
        return
    model.eval()  # a second graph where training drops tokens over a capacity, else the same
    torch.testing.assert_close(results(graph, model, x, 1), results(model, model, x, 1))
    assert counter.frame_count == (2 if model.config.moe.experts == 0 else 3)


@pytest.mark.parametrize("name", ["deeploop", "loom"])
def test_the_backward_is_one_graph_with_functionalised_ops(name):
    model, graph, _ = compiled(name, "aot_eager", loops=1)
    x = tokens(2)
    torch.testing.assert_close(results(graph, model, x, 1), results(model, model, x, 1))


def test_other_batches_and_lengths_share_a_graph():
    """A second size makes a dimension symbolic; sizes after it compile nothing."""
    model, graph, counter = compiled("loom", loops=1)
    for batch, length in ((2, 8), (3, 8), (3, 7)):
        graph(tokens(batch, length), 1)
    before = counter.frame_count
    for batch, length in ((4, 6), (5, 5)):
        x = tokens(batch, length)
        torch.testing.assert_close(results(graph, model, x, 1), results(model, model, x, 1))
    assert before == 3 and counter.frame_count == before
