"""HRM and TRM against plain models; which calls have gradients; what is shared and saved."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from deeploop.config.presets.reasoner import reasoner_presets
from deeploop.model.looplm import count_parameters
from deeploop.model.puzzle_embedding import PuzzleEmbedding
from deeploop.model.reasoner import Carry, Reasoner
from deeploop.train.losses.reasoner import continue_target, segment_loss
from deeploop.utils.device import autocast
from deeploop.utils.errors import InputError
from tests.helpers.plain_reasoner import examples, plain_loss, plain_segment, scattered, small

HRM = {}
TRM = {"shared": True, "gradient": "last_cycle", "halting": "halt", "layers_low": 2}
MIXER = TRM | {"mixer": "mlp", "mixer_width": 6, "positions": False}
CASES = {  # fields, alphas of H and L, calls with gradient
    "hrm": (HRM, (1, 1), 2),
    "hrm without puzzles": ({"puzzle_tokens": 0}, (1, 1), 2),
    "hrm without positions": ({"positions": False}, (1, 1), 2),
    "hrm, paper": ({"visits": "paper"}, (10**0.5, 10**0.5), 2),  # 2 (2 + 3 x 1)
    "hrm, counted": ({"visits": "counted"}, (6**0.5, 6**0.5), 2),
    "hrm, last cycle": ({"gradient": "last_cycle"}, (1, 1), 4),
    "hrm, last cycle, by module": (
        {"gradient": "last_cycle", "visits": "counted", "scale_per": "module"}, (2, 6**0.5), 4,
    ),
    "trm": (TRM, (1, 1), 4),
    "trm, counted": (TRM | {"visits": "counted"}, (4, 4), 4),  # 2 x 2 x (3 + 1) = 16
    "trm, one step": (TRM | {"gradient": "one_step"}, (1, 1), 2),
    "trm, mixer": (MIXER, (1, 1), 4),
    "trm, mixer, counted": (MIXER | {"visits": "counted"}, (4, 4), 4),
}  # fmt: skip
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def run_two_segments(case):
    """Two segments, of which one sequence starts again before the second: ours and plain."""
    fields, alphas, attached = CASES[case]
    model = scattered(small(fields))
    tokens, puzzles, targets = examples()
    first = model(tokens, puzzles, model.start(3))
    vectors = None if model.puzzles is None else model.puzzles.weight[puzzles].requires_grad_()
    plain = plain_segment(model, tokens, vectors, *model.start(3), alphas, attached)
    again = torch.tensor([False, True, False])
    carry = model.reset(first.carry, again)
    wanted = [z.detach().clone() for z in (plain.z_H, plain.z_L)]
    for z, start in zip(wanted, (model.start_high, model.start_low), strict=True):
        z[1] = start
    if model.puzzles is not None:
        model.puzzles.drawn.clear()
    second = model(tokens, puzzles, carry)
    plain = plain_segment(model, tokens, vectors, *wanted, alphas, attached)
    return model, second, plain, targets, vectors


@pytest.mark.parametrize("case", CASES)
def test_states_logits_q_loss_and_all_gradients_are_those_of_the_equations(case):
    model, segment, plain, targets, vectors = run_two_segments(case)
    with torch.no_grad():
        tokens, puzzles, _ = examples()
        after = model(tokens, puzzles, segment.carry)
        plain_after = plain_segment(model, tokens, vectors, plain.z_H, plain.z_L, CASES[case][1])
    last = torch.tensor([True, False, False])
    hrm = model.config.reasoner.halting == "halt_continue"
    target = continue_target(after.q, last) if hrm else None
    wanted_q = plain_after.q.max(1).values
    wanted_q = torch.where(last, plain_after.q[:, 0], wanted_q).sigmoid() if hrm else None

    loss = segment_loss(model.logits(segment.n), segment.q, targets, 8, target)
    plain_total = plain_loss(plain, targets, 8, wanted_q)
    torch.testing.assert_close(segment.carry, Carry(plain.z_H, plain.z_L), **CLOSE)
    torch.testing.assert_close(model.logits(segment.n), plain.logits, **CLOSE)
    torch.testing.assert_close(segment.q, plain.q, **CLOSE)
    torch.testing.assert_close(loss.total, plain_total, **CLOSE)

    names, weights = zip(*model.named_parameters(), strict=True)
    loss.total.backward()
    theirs = torch.autograd.grad(plain_total, [*weights, *([] if vectors is None else [vectors])])
    for name, p, g in zip(names, weights, theirs[: len(names)], strict=True):
        torch.testing.assert_close(p.grad, g, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
        assert name.startswith("q_head") or g.abs().max() > 1e-6, name
    if vectors is not None:
        [(_, rows)] = model.puzzles.drawn
        torch.testing.assert_close(rows.grad, theirs[-1], **CLOSE)


@pytest.mark.parametrize("gradient", ["one_step", "last_cycle"])
def test_the_gradient_is_that_of_the_last_calls_alone(gradient):
    """Copies of the modules for each call: only those of the last calls get a gradient."""
    config = small({"gradient": gradient})
    model, copies = scattered(config), {}
    for call in [(cycle, step) for cycle in range(2) for step in (0, 1, 2, -1)]:
        other = scattered(config)
        copies[call] = (other.high if call[1] == -1 else other.low).sublayers
    tokens, puzzles, _ = examples()
    segment = model(tokens, puzzles, model.start(3), by_call=copies)
    (segment.n.square().sum() + segment.n.sum() + segment.q.sum()).backward()
    got = [call for call, blocks in copies.items() if blocks[0].branch.out.weight.grad is not None]
    whole = [] if gradient == "one_step" else [(1, 0), (1, 1)]
    assert got == [*whole, (1, 2), (1, -1)]
    assert all(p.grad is None for s in model.all_sublayers() for p in s.parameters())


def test_a_carry_has_no_gradient_and_a_start_is_fixed():
    model = scattered(small(HRM))
    tokens, puzzles, _ = examples()
    carry = model(tokens, puzzles, model.start(3)).carry
    assert not carry.high.requires_grad and not carry.low.requires_grad
    assert not model.start_high.requires_grad and "start_high" in model.state_dict()
    high, low = model.start(2)
    assert torch.equal(high[1, 4], model.start_high) and torch.equal(low[0, 6], model.start_low)


def test_visits_say_which_module_and_call_they_are_of():
    model = scattered(small(HRM))
    tokens, puzzles, _ = examples()
    seen = []
    model(tokens, puzzles, model.start(3), on_visit=lambda v, h: seen.append((v.block, v.loop)))
    low, high = [(0, n) for n in range(6)], [[(1, n), (2, n)] for n in range(2)]
    calls = [*([v] for v in low[:3]), high[0], *([v] for v in low[3:]), high[1]]
    assert seen[::2] == [v for call in calls for v in call]


def test_a_shared_module_has_each_storage_once():
    model, other = Reasoner(small(TRM)), Reasoner(small(HRM | {"layers_low": 2}))
    assert model.high is model.low and other.high is not other.low
    assert len(list(model.all_sublayers())) == 4 and len(list(other.all_sublayers())) == 8
    state = model.state_dict()
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == len(state)
    assert count_parameters(model) == sum(p.numel() for p in model.parameters())
    block = 4 * 8**2 + 3 * 8 * 12
    assert count_parameters(other) - count_parameters(model) == 2 * block


@pytest.mark.parametrize("fields", [HRM, TRM, MIXER], ids=["hrm", "trm", "mixer"])
def test_a_file_of_weights_makes_the_same_model(fields, tmp_path):
    model, tokens = scattered(small(fields)), examples()[0]
    save_file(model.state_dict(), tmp_path / "weights")
    other = scattered(small(fields), seed=5)
    other.load_state_dict(load_file(tmp_path / "weights"))
    puzzles = torch.tensor([1, 2, 3])
    for a, b in zip(*(m(tokens, puzzles, m.start(3)) for m in (model, other)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("fields", [HRM, TRM, MIXER], ids=["hrm", "trm", "mixer"])
def test_bfloat16_runs_with_a_float32_stream_and_q(fields):
    torch.manual_seed(0)
    model = Reasoner(small(fields))
    tokens, puzzles, targets = examples()
    exact = model(tokens, puzzles, model.start(3))
    with autocast(torch.device("cpu"), "bf16"):
        segment = model(tokens, puzzles, model.start(3))
        logits = model.logits(segment.n)
    assert logits.dtype == torch.bfloat16
    assert segment.n.dtype == segment.q.dtype == segment.carry.low.dtype == torch.float32
    assert (segment.n - exact.n).square().mean().sqrt() < 0.15  # of 1; eight calls deep
    segment_loss(logits, segment.q, targets, 3).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_starting_weights_are_truncated_normals():
    """Deviations d^-1/2 of the embedding, fan_in^-1/2 of matrices times beta, never on Q and K."""
    torch.manual_seed(0)
    fields = {"visits": "counted", "puzzles": 1, "layers_high": 1}
    config = dataclasses.replace(small(fields), d_model=128, d_ff=256, vocab_size=500)
    model = Reasoner(config)
    beta, std = (8 * 2) ** -0.5, 128**-0.5
    attention, mlp = (s.branch for s in model.low.sublayers)
    q, k, v = attention.qkv.weight.chunk(3)
    wanted = [
        (model.embed_tokens.weight, std), (model.lm_head.weight, std), (q, std), (k, std),
        (v, beta * std), (attention.out.weight, beta * std), (mlp.gate_up.weight, beta * std),
        (mlp.out.weight, beta * 256**-0.5),
    ]  # fmt: skip
    for weight, deviation in wanted:
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)
        assert weight.abs().max() < 2.28 * deviation  # cut at 2 deviations of a wider normal
    assert model.start_high.std().item() == pytest.approx(1, rel=0.2)
    assert not model.q_head.weight.any() and (model.q_head.bias == -5).all()
    assert not model.puzzles.weight.any()
    e = model.embed(torch.randint(0, 500, (8, 5)), torch.zeros(8, dtype=torch.int64))
    assert e[:, 2:].std().item() == pytest.approx(1, rel=0.03) and not e[:, :2].any()


def test_branches_compile_and_count_no_calls():
    model = scattered(small(TRM))
    tokens, puzzles, _ = examples()
    wanted = model(tokens, puzzles, model.start(3)).n
    graphs = []
    for sublayer in model.all_sublayers():
        sublayer.branch.compile(backend=lambda g, _: graphs.append(g) or g.forward, fullgraph=True)
    torch.testing.assert_close(model(tokens, puzzles, model.start(3)).n, wanted)
    assert len(graphs) == 2 * len(list(model.all_sublayers()))  # with gradients and without


def test_bad_inputs_are_refused_in_a_sentence():
    model = Reasoner(small(HRM))
    tokens, puzzles, _ = examples()
    with pytest.raises(InputError, match="4 cells, but the model has 5"):
        model(tokens[:, :4], puzzles, model.start(3))
    with pytest.raises(InputError, match="puzzles: none given"):
        model(tokens, None, model.start(3))
    with pytest.raises(InputError, match=r"model\.reasoner\.puzzles=0"):
        Reasoner(small({"puzzles": 0}))
    with pytest.raises(InputError, match=r"model\.vocab_size=0"):
        Reasoner(dataclasses.replace(small(HRM), vocab_size=0))


class OtherRank:
    """Ranks of two, of which this process computes one and the other's tensors are known."""

    def __init__(self, first: bool, others):
        self.first, self.others = first, list(others)

    def all_gather(self, tensor):
        other = self.others.pop(0)
        return torch.cat([tensor, other] if self.first else [other, tensor])


def test_a_sign_step_is_the_dense_one_on_the_drawn_rows_and_two_ranks_are_one():
    torch.manual_seed(0)
    ids, gradients = torch.tensor([3, 1, 3, 4]), torch.randn(4, 6)
    gradients[2, 0] = -2 * gradients[0, 0]  # the sum has the other sign
    gradients[2, 1] = -gradients[0, 1]  # the sum is 0
    start = torch.randn(6, 6)

    def drawn(rows):
        table = PuzzleEmbedding(6, 6)
        table.weight.copy_(start)
        for part in rows.split(1):  # micro-batches
            (table(ids[part]) * gradients[part]).sum().backward()
        return table

    dense = torch.zeros(6, 6).index_add(0, ids, gradients)
    wanted = start.clone()
    wanted[[1, 3, 4]] = 0.9 * start[[1, 3, 4]] - 0.2 * dense[[1, 3, 4]].sign()
    alone = drawn(torch.arange(4))
    alone.step(0.2, 0.5)
    torch.testing.assert_close(alone.weight, wanted)
    assert (wanted[3, 0] - 0.9 * start[3, 0]) * gradients[0, 0] > 0
    for first, rows in ((True, torch.arange(2)), (False, torch.arange(2, 4))):
        table, other = drawn(rows), torch.arange(2, 4) if first else torch.arange(2)
        table.step(0.2, 0.5, OtherRank(first, [ids[other], gradients[other]]))
        assert torch.equal(table.weight, alone.weight)
    alone.step(0.2, 0.5)  # nothing was drawn since
    torch.testing.assert_close(alone.weight, wanted)


def test_a_step_that_is_skipped_leaves_the_table():
    table = PuzzleEmbedding(3, 4)
    (table(torch.tensor([1, 1])) * torch.nan).sum().backward()
    table.step(1.0, 0.5, skip=torch.tensor(True))
    assert not table.weight.any()


def test_vectors_draw_no_gradient_in_evaluation():
    table = PuzzleEmbedding(3, 4).eval()
    assert not table(torch.tensor([1])).requires_grad and not table.drawn
    with torch.no_grad():
        table.train()(torch.tensor([1]))
    assert not table.drawn


@pytest.mark.parametrize(("name", "millions"), [
    ("hrm-sudoku", 27), ("hrm-maze", 27), ("hrm-arc", 27), ("trm-arc", 7), ("trm-sudoku", 5),
])  # fmt: skip
def test_sizes_are_the_papers(name, millions):
    """27M of HRM and 7M of TRM with attention; its MLP over 97 positions is smaller."""
    [config] = [c for c in reasoner_presets() if c.preset == name]
    vocab = {"sudoku": 11, "maze": 6, "arc": 12}[name.split("-")[1]]
    model = dataclasses.replace(config.model, vocab_size=vocab)
    model = dataclasses.replace(model, reasoner=dataclasses.replace(model.reasoner, puzzles=1))
    with torch.device("meta"):
        size = sum(p.numel() for p in Reasoner(model).parameters())
    assert size == pytest.approx(millions * 1e6, rel=0.04)
