"""Bound from below, in closed form, the bytes that training or generation takes.

A bound takes no time and allocates nothing, so that a configuration that cannot run is refused
before anything is written. `deeploop.analyze.plan` counts the same bytes exactly, in seconds to
minutes; the bound is half to nine tenths of them. Of a token's visits these tensors are saved for
backward, in units of d_model values of the branches' dtype (c bytes; the stream h is float32):

    attention      n, q, k, v, output                            5 c; 3 c if k and v are loop 1's
    SwiGLU         n, [gate, up]; not compiled: silu(gate), the product     c + (2 to 4) c ff / d
    experts        n, and by routed expert: [gate, up], output   c + top_k (2 c f / d + c)
    adapters       x A^T of each matrix                          c rank / d
    each update    the new stream                                4

With recompute = visit or loop only h and n at its start are saved, and the tensors above exist
for one visit or loop at a time. A loop that takes a share of the tokens saves that share.
"""

import dataclasses

import torch

from deeploop.config import Config, ModelConfig
from deeploop.config.backprop import segments
from deeploop.config.depth import key_loops, loop_shares
from deeploop.model.flops import (
    adapter_ranks,
    adapter_weights,
    block_weights,
    dense_block_weights,
)
from deeploop.model.loss import CHUNK_BYTES
from deeploop.model.residual import residual_rule
from deeploop.utils.device import computes_in_bf16
from deeploop.utils.memory import check_fits

STEPS = (
    16  # the first of a run, of which the one with the most loops is taken, where they are drawn
)
STREAM = 4  # bytes of a value of the residual stream, and of a weight


def parameters(m: ModelConfig) -> int:
    """Count the parameters, but for gains: the matrices, each once."""
    heads = 1 if residual_rule(m).ties_head else 2
    unlooped = (m.prelude + m.coda) * dense_block_weights(m)
    between = border_parameters(m)
    return heads * m.vocab_size * m.d_model + core_parameters(m) + unlooped + between


def border_parameters(m: ModelConfig) -> int:
    """Count the matrices of `deeploop.model.borders`: injection, readout, modulation by loop."""
    squares = {"adapter": 2, "contractive": 1}.get(m.inject, 0) + m.readout_map
    squares += 1 + 4 * m.n_layers if m.loop_signal == "modulate" else 0
    return squares * m.d_model**2


def core_parameters(m: ModelConfig) -> int:
    """Count the parameters of the looped blocks, but for gains."""
    e = m.moe
    whole = dataclasses.replace(m, moe=dataclasses.replace(e, top_k=e.experts or e.top_k))
    later_routers = (m.loops - 1) * e.experts * m.d_model if e.router_per_loop else 0
    later_adapters = (m.loops - 1) * adapter_weights(m)
    return m.n_layers * (block_weights(whole) + later_routers + later_adapters)


def block_values(m: ModelConfig, dense: bool, compiled: bool) -> tuple[int, int]:
    """Count the values of the branches that a block saves for one token: of attention, of the rest.

    Args:
        m: the model.
        dense: with a SwiGLU even if the looped blocks have experts.
        compiled: by torch.compile, which computes some of them again in backward.
    """
    e, products = m.moe, 2 if compiled else 4
    attention = (5 if dense or key_loops(m, 2) == 2 else 3) * m.d_model
    if dense or not e.experts:
        qkv, out, *others = [0] * 4 if dense else [rank for _, rank in adapter_ranks(m)]
        return attention + qkv + out, m.d_model + products * m.ff_width + sum(others)
    width = e.d_expert or m.d_model
    routed = e.top_k * (2 * width + m.d_model)
    return attention, m.d_model + routed + products * e.shared * width


def saved_bytes(config: Config, branch_bytes: int) -> tuple[int, int]:
    """Return the bytes that one token has saved when backward starts, at least.

    Args:
        config: the run.
        branch_bytes: bytes of a value of the branches, 2 or 4.

    Returns:
        The bytes saved by forward, and those by which recomputing the last visit or loop exceeds
        what backward has freed before it.
    """
    m, t = config.model, config.train
    with_gradient = (s.loops for step in range(STEPS) for s in segments(t, m.loops, step))
    shares = max((loop_shares(m, loops) for loops in with_gradient), key=sum)
    loops, last = sum(shares), shares[-1]
    updates = 2 * STREAM * m.d_model
    unlooped = sum(block_values(m, True, t.compile)) * branch_bytes + updates
    attention, rest = (n * branch_bytes for n in block_values(m, False, t.compile))
    core, start = attention + rest + updates, (STREAM + branch_bytes) * m.d_model
    coda = m.coda * unlooped
    outside = m.prelude * unlooped + coda
    if t.recompute == "visit":
        again = max(attention, rest) - branch_bytes * m.d_model
        return outside + int(loops * m.n_layers * 2 * start), int(last * again) - coda
    if t.recompute == "loop":
        return outside + int(loops * start), int(last * (m.n_layers * core - start)) - coda
    return outside + int(loops * m.n_layers * core), 0


def least_training_bytes(config: Config, device: torch.device, sequences: int) -> tuple[int, int]:
    """Return the bytes of a training step of one process, at least: of the model, of its tokens.

    Those of the model are weights, gradients and AdamW's moments; those of the tokens grow with
    the micro-batch.

    Args:
        config: of the run; with model.vocab_size 0 embedding and head are left out.
        device: device of the step.
        sequences: of this process in a batch.
    """
    m, t = config.model, config.train
    bf16 = t.precision == "bf16" or (t.precision == "auto" and computes_in_bf16(device))
    micro = min(t.micro_batch or sequences, sequences)
    tokens = micro * m.seq_len
    weights = STREAM * parameters(m)
    moments = 2 * weights if t.steps > 1 else 0  # after the last step nothing is saved any more
    in_loss = weights if micro < sequences else STREAM * m.vocab_size * m.d_model
    chunk = max(1, CHUNK_BYTES[device.type] // (4 * m.vocab_size)) if m.vocab_size else 0
    saved, again = saved_bytes(config, 2 if bf16 else 4)
    saved = tokens * saved + max(tokens * again, 4 * m.vocab_size * min(tokens, chunk))
    batch = 16 * sequences * m.seq_len  # token and target, int64
    at_loss, at_end = (in_loss, saved + batch), (weights, batch)
    gradients, of_tokens = max(at_loss, at_end, key=sum)
    return weights + moments + gradients, of_tokens


def check_training(config: Config, device: torch.device, sequences: int) -> None:
    """Refuse a training step that cannot fit in memory; raises InputError.

    Arguments are those of `least_training_bytes`.
    """
    of_model, of_tokens = least_training_bytes(config, device, sequences)
    m, t = config.model, config.train
    if of_model > of_tokens:
        fields, remedy = _model_fields(m), "take a smaller model or a device with more memory"
    else:
        batch = f"train.micro_batch={t.micro_batch}"
        if not t.micro_batch:
            batch = f"train.batch_size={t.batch_size} without train.micro_batch"
        fields = f"model.n_layers={m.n_layers}, model.loops={m.loops}, model.seq_len={m.seq_len}"
        fields += f", {batch}"
        remedy = "give a smaller --micro-batch, "
        remedy += "fewer loops, --backprop segments, " if t.backprop == "full" else ""
        remedy += "--train.recompute loop, " if t.recompute == "none" else ""
        remedy += "a smaller model or a device with more memory"
    check_fits(of_model + of_tokens, device, f"{fields}: a training step", remedy)


def check_diagnosis(config: Config, device: torch.device, sequences: int) -> None:
    """Refuse a diagnosis that cannot fit in memory; raises InputError.

    In float32 it has everything saved for one backward through all loops, and a gradient of the
    looped blocks for every loop, beside the weights.

    Args:
        config: of the run.
        device: device of the diagnosis.
        sequences: of the held-out batch.
    """
    m = config.model
    full = config.replace("train", backprop="full", recompute="none", compile=False)
    saved = sequences * m.seq_len * saved_bytes(full, 4)[0]
    routers = m.n_layers * m.moe.experts * m.d_model * (m.loops if m.moe.router_per_loop else 1)
    of_one_loop = routers + m.loops * m.n_layers * adapter_weights(m)
    gradients = STREAM * m.loops * (core_parameters(m) - of_one_loop)
    check_fits(
        STREAM * parameters(m) + gradients + saved,
        device,
        f"model.d_model={m.d_model}, model.n_layers={m.n_layers}, model.loops={m.loops}, "
        f"model.seq_len={m.seq_len}, {sequences} sequences: a diagnosis",
        "give fewer --sequences or a smaller model",
    )


def check_generation(
    m: ModelConfig, device: torch.device, batch: int = 0, length: int = 0, loops: int = 0
) -> None:
    """Refuse a model, and the keys and values of its text, that cannot fit; raises InputError.

    Args:
        m: the model.
        device: device of the model.
        batch: texts that are generated at once; 0: none.
        length: tokens of each that the model sees at once.
        loops: loops to run; 0: as trained.
    """
    loops = loops or m.loops
    weights = STREAM * parameters(m)
    slots = m.prelude + m.n_layers * key_loops(m, loops) + m.coda
    cache = 2 * STREAM * slots * batch * m.d_model * length
    fields, remedy = _model_fields(m), "take a device with more memory"
    if cache > weights:
        fields = f"loops={loops}, num_samples={batch}, {length} tokens at once"
        remedy = "give fewer loops, samples or tokens"
    check_fits(weights + cache, device, f"{fields}: the model and its cache", remedy)


def check_evaluation(m: ModelConfig, device: torch.device, batch: int, loops: int) -> None:
    """Refuse an evaluation by loop that cannot fit in memory; raises InputError.

    Beside the weights it has of each token the stream and the final state of two loops, the
    values of one branch, five figures of each loop, and of some tokens three rows of logits.

    Args:
        m: the model.
        device: device of the evaluation.
        batch: sequences at once.
        loops: loops to run.
    """
    weights, tokens = STREAM * parameters(m), batch * m.seq_len
    states = 2 * (STREAM + 2) * m.d_model + 2 * max(block_values(m, False, True))
    rows = min(tokens, max(1, CHUNK_BYTES[device.type] // (4 * max(1, m.vocab_size))))
    of_tokens = tokens * (states + 5 * 4 * loops) + 3 * 4 * m.vocab_size * rows
    fields, remedy = _model_fields(m), "take a device with more memory"
    if of_tokens > weights:
        fields = f"loops={loops}, batch_size={batch}, model.seq_len={m.seq_len}"
        remedy = "give a smaller --batch-size or fewer --loops"
    check_fits(weights + of_tokens, device, f"{fields}: an evaluation", remedy)


def _model_fields(m: ModelConfig) -> str:
    """Return the fields that decide the size of the weights, with their values."""
    fields = f"model.d_model={m.d_model}, model.n_layers={m.n_layers}"
    if m.vocab_size:
        fields += f", model.vocab_size={m.vocab_size}"
    if m.d_ff:
        fields += f", model.d_ff={m.d_ff}"
    if m.moe.experts:
        fields += f", model.loops={m.loops}, model.moe.experts={m.moe.experts}"
    return fields
