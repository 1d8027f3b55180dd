"""Tokens per second of greedy generation by loops, with the cache and without one.

    pytest bench/suites/bench_decode.py -s [--benchmark-json=FILE]

The default model on a CPU, the 124M one on CUDA, float32 as in `deeploop generate`, batches of
1 and 8:

* cached: `deeploop.eval.generate.sample`, which caches keys and values of every visit;
* recomputed: for each new token, all tokens so far through the model.

Their final states must agree before anything is timed. A call reads the prompt and adds the new
tokens; tokens per second count the new ones. FLOPs are those of the cached contender. The floor
reads the head for each token and the blocks' weights for each loop: all other blocks run between
two visits of one, so a processor's cache saves a read only if it is as large as all blocks.
Reading the cached keys and values is not in the floor.
"""

import dataclasses

import pytest
import torch

from bench.harness.record import Work, one_line
from bench.harness.timing import relative_error
from deeploop.config.presets import preset
from deeploop.eval.generate import sample
from deeploop.model.flops import block_weights, forward_flops
from deeploop.model.looplm import LoopLM
from deeploop.utils.device import pick_device

DEVICE = pick_device("auto")
CUDA = DEVICE.type == "cuda"
LOOPS = (1, 3, 7) if CUDA else (1, 4, 8)
PROMPT, NEW = (512, 64) if CUDA else (64, 16)


def built(loops: int) -> LoopLM:
    config = preset(f"gpt2-small-r{loops}-deeploop") if CUDA else preset("deeploop-tiny")
    if not CUDA:
        config = config.replace("model", loops=loops, vocab_size=256)
    torch.manual_seed(0)
    return LoopLM(config.model).to(DEVICE).eval()


@torch.no_grad()
def recomputed(model: LoopLM, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """Generate greedily, every position computed again for each token.

    prompt: int64 [B, T]; returns int64 [B, T + new].
    """
    tokens = prompt
    for _ in range(new):
        chosen = model.logits(model(tokens)[:, -1]).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, chosen), 1)
    return tokens


@torch.no_grad()
def check(model: LoopLM, tokens: torch.Tensor) -> None:
    """Compare final states with and without a cache; ties may still make the tokens differ."""
    cache = model.new_cache(len(tokens), tokens.shape[1])
    states = [model(chunk, cache=cache) for chunk in tokens.split([PROMPT] + [1] * NEW, 1)]
    error = relative_error(torch.cat(states, 1), model(tokens))
    assert error < 1e-4, f"cached states are off by {error:.1e}"


def work(model: LoopLM, batch: int) -> Work:
    """Count the work of the prompt and NEW - 1 more tokens; the last one is only chosen."""
    m = model.config
    passed = PROMPT + NEW - 1
    # A token attends to the tokens before it: half of all pairs of positions.
    blocks = (
        batch * forward_flops(dataclasses.replace(m, seq_len=passed // 2), range(m.loops)) * passed
    )
    head = batch * 2 * m.vocab_size * m.d_model
    weights = m.loops * m.n_layers * block_weights(m) + m.vocab_size * m.d_model
    return Work(4 * NEW * weights, blocks + NEW * head, batch * NEW)


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("batch", [1, 8])
def test_decode(benchmark, machine, batch, loops):
    model = built(loops)
    prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=DEVICE)
    check(model, recomputed(model, prompt, NEW))
    calls = {
        "cached": lambda: sample(model, prompt, NEW, temperature=0),
        "recomputed": lambda: recomputed(model, prompt, NEW),
    }
    tensors = [*model.parameters(), *model.buffers(), prompt]
    existing = {name: tensors for name in calls}
    fused = {"cached": ("post_sandwich_forward",)}
    entries = machine.compare(calls, existing, rounds=5 if CUDA else 3, fused=fused)
    case = {"batch": batch, "loops": loops, "prompt": PROMPT, "new": NEW}
    benchmark.extra_info |= machine.record(
        "decode", case, torch.float32, work(model, batch), entries, ["recomputed"], {}
    )
    print(f"\n{one_line(benchmark.extra_info)}")
    benchmark.pedantic(calls["cached"], rounds=1)
