"""The closed form of the two moving averages is their definition, values and gradients."""

import pytest
import torch

from deeploop import kernels
from deeploop.kernels.reference import rms_norm
from deeploop.utils.errors import InputError
from tests.helpers.kernel_cases import EPS

LOOPS, LAYERS, SCALE = 4, 3, 0.3
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
decays = pytest.mark.parametrize("decay", [0.5, 0.0, 0.9, 1.0])


class Average:
    """N <- b N + o ; D <- b D + 1 ; read N / D."""

    def __init__(self):
        self.total, self.weight = 0.0, 0.0

    def take(self, x, decay):
        self.total = decay * self.total + x
        self.weight = decay * self.weight + 1
        return self.total / self.weight


def by_definition(h, branches, w, decay, source="output"):
    """Every h' and n of the walk, from the running sums themselves."""
    outputs, over_loops = [], Average()
    for loop in range(LOOPS):
        in_loop = Average()
        for layer in range(LAYERS):
            output = SCALE * branches[loop * LAYERS + layer]
            local = in_loop.take(output, decay)
            h = h + local + over_loops.take(output if source == "output" else local, decay)
            outputs += [h, rms_norm(h, w, EPS)]
    return outputs


def closed_form(h, branches, w, decay):
    outputs, glob = [], None
    for loop in range(1, LOOPS + 1):
        local = None
        for layer in range(1, LAYERS + 1):
            f = branches[(loop - 1) * LAYERS + layer - 1]
            by_local, by_global = kernels.looping_coefficients(loop, layer, LAYERS, decay)
            h, local, n = kernels.looping_update(
                h, f, local, glob, w,
                scale=SCALE, decay=decay, read_local=by_local, read_global=by_global, eps=EPS,
            )  # fmt: skip
            outputs += [h, n]
        glob = kernels.looping_carry(glob, local, LAYERS, decay)
    return outputs


def two_memories(h, branches, w, decay, source="output"):
    outputs, glob = [], None
    for loop in range(1, LOOPS + 1):
        local = None
        for layer in range(1, LAYERS + 1):
            f = branches[(loop - 1) * LAYERS + layer - 1]
            by_local, by_global = kernels.two_memory_coefficients(loop, layer, LAYERS, decay)
            h, local, glob, n = kernels.looping_update_two(
                h, f, local, glob, w, source=source,
                scale=SCALE, decay=decay, read_local=by_local, read_global=by_global, eps=EPS,
            )  # fmt: skip
            outputs += [h, n]
    return outputs


@pytest.fixture
def walk_inputs():
    torch.manual_seed(0)
    h, *branches = (torch.randn(3, 8, dtype=torch.float64) for _ in range(LOOPS * LAYERS + 1))
    w = torch.rand(8, dtype=torch.float64) + 0.5
    return [x.requires_grad_() for x in (h, w, *branches)]


def values_and_gradients(walk, inputs, *arguments):
    h, w, *branches = inputs
    outputs = walk(h, branches, w, *arguments)
    torch.manual_seed(1)
    gradients = torch.autograd.grad(outputs, inputs, [torch.randn_like(x) for x in outputs])
    return [*outputs, *gradients]


def close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **TIGHT)


@decays
def test_closed_form_is_the_definition(walk_inputs, decay):
    expected = values_and_gradients(by_definition, walk_inputs, decay)
    close(values_and_gradients(closed_form, walk_inputs, decay), expected)


@decays
@pytest.mark.parametrize("source", ["output", "readout"])
def test_two_memories_are_the_definition(walk_inputs, decay, source):
    expected = values_and_gradients(by_definition, walk_inputs, decay, source)
    close(values_and_gradients(two_memories, walk_inputs, decay, source), expected)


def test_the_two_readings_differ(walk_inputs):
    h, w, *branches = walk_inputs
    by_output, by_readout = (by_definition(h, branches, w, 0.5, s) for s in ("output", "readout"))
    assert torch.equal(by_output[0], by_readout[0]), "at the first layer both take c * f"
    assert not torch.allclose(by_output[2], by_readout[2])


def test_first_layer_adds_twice_the_branch(walk_inputs):
    h, w, f, *_ = walk_inputs
    for decay in (0.0, 0.5, 1.0):
        assert kernels.looping_coefficients(1, 1, LAYERS, decay)[0] == 2.0
        assert kernels.two_memory_coefficients(1, 1, LAYERS, decay) == (1.0, 1.0)
        for walk in (closed_form, two_memories):
            first = walk(h, [f] * LOOPS * LAYERS, w, decay)[0]
            torch.testing.assert_close(first, h + 2 * SCALE * f, **TIGHT)


def test_carry_is_a_tensor_of_its_own():
    local = torch.randn(2, 4)
    carried = kernels.looping_carry(None, local, LAYERS, 0.5)
    assert torch.equal(carried, local) and carried.data_ptr() != local.data_ptr()
    later = kernels.looping_carry(carried, local, LAYERS, 0.5)
    torch.testing.assert_close(later, local + 0.125 * carried)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 3, 0.5), "loop is 0; allowed: 1 or more"),
        ((1, 0, 3, 0.5), "layer is 0; allowed: 1 to n_layers, 3"),
        ((1, 4, 3, 0.5), "layer is 4; allowed: 1 to n_layers, 3"),
        ((1, 1, 3, 1.5), "decay is 1.5; allowed: 0 to 1"),
    ],
)
def test_bad_places_are_refused(arguments, message):
    with pytest.raises(InputError, match=f"^looping_coefficients: {message}"):
        kernels.looping_coefficients(*arguments)


def test_bad_source_is_refused():
    x, factors = torch.randn(2, 4), {"scale": 1.0, "decay": 0.5}
    with pytest.raises(InputError, match="source is 'both'; allowed: 'output' or 'readout'"):
        kernels.looping_update_two(
            x, x, None, None, None, **factors, read_local=1.0, read_global=1.0, source="both"
        )


def test_inject_with_ones_is_an_addition():
    torch.manual_seed(0)
    h, x, w = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    added, n = kernels.inject(h, x, w, 1.0, 1.0)
    torch.testing.assert_close(added, h + x)
    for actual, expected in zip((added, n), kernels.pre_norm(h, x, w), strict=True):
        torch.testing.assert_close(actual, expected)
