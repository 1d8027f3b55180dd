"""Sample text from a trained model, with keys and values cached per visit."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.config.fields import MAX_INT, MAX_SEED
from deeploop.data.tokenizer import Tokenizer, load_tokenizer
from deeploop.model.looplm import LoopLM
from deeploop.model.memory import check_generation
from deeploop.runs import checkpoint
from deeploop.runs.folder import read_corpus_file
from deeploop.utils.device import pick_device
from deeploop.utils.disk import user_path
from deeploop.utils.errors import Diverged, InputError
from deeploop.utils.foreign import foreign, read_bytes


def load(run: str, device: str = "cpu") -> LoopLM:
    """Load the model of a run's folder or of a checkpoint, in eval mode.

    Raises InputError where there is none, its files are damaged, or memory cannot hold it.
    """
    return load_model(checkpoint.find(run), pick_device(device, "device"))


def load_model(ckpt: checkpoint.Checkpoint, device: torch.device) -> LoopLM:
    """Load the model of a checkpoint, in eval mode; raises what `load` does."""
    ckpt.config.model.require_loops("generate")
    check_generation(ckpt.config.model, device)
    model = LoopLM(ckpt.config.model)
    checkpoint.load_weights(ckpt, model)
    return model.to(device).eval()


def load_run_tokenizer(folder: Path, given: str = "") -> Tokenizer:
    """Load the tokenizer that corpus.json in a run or checkpoint names, or the one `given`.

    Raises InputError where it names none and none is given, or where both are not the same.
    """
    facts = read_corpus_file(folder)
    if "task" in facts:
        raise InputError(
            f"run {folder}: was trained on the task {facts['task']}, whose ids stand for no text"
        )
    spec = facts.get("tokenizer")
    if spec is None and not given:
        raise InputError(
            f"run {folder}: its token shards name no tokenizer, so text cannot be encoded; give "
            "theirs as --tokenizer"
        )
    if spec is None:
        return load_tokenizer(given)
    if given and load_tokenizer(given).fingerprint != load_tokenizer(spec, folder).fingerprint:
        raise InputError(
            f"tokenizer {given!r} is not the one that run {folder} was trained with ({spec}); "
            "leave it out"
        )
    return load_tokenizer(spec, folder)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # else one graph per cache slot and length is compiled
def sample(
    model: LoopLM,
    prompt: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    loops: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Continue a prompt by up to `new_tokens` tokens.

    Args:
        prompt: int64 [B, T].
        temperature: 0 takes the most likely token.
        top_k: draw among the k most likely tokens; 0 draws among all.
        loops: loops to run; None runs those of training.
        seed: of the draws.
        stop: end-of-text token; sampling ends early once every row has drawn it.

    Returns:
        int64 [B, T + new_tokens], or shorter after `stop`. The model sees at most
        `seq_len` tokens: when the cache is full, the newest half of the window is read
        again from position 0.

    Raises:
        InputError: the prompt is empty, or loops < 1.
        Diverged: the model's output is not finite.
    """
    if prompt.shape[1] < 1:
        raise InputError("prompt: is empty; give at least one token")
    window = min(model.config.seq_len, prompt.shape[1] + new_tokens)
    draw = torch.Generator(prompt.device).manual_seed(seed)
    tokens, fresh = prompt, prompt[:, -window:]
    cache = model.new_cache(prompt.shape[0], window, loops)
    ended = torch.zeros(prompt.shape[0], 1, dtype=torch.bool, device=prompt.device)
    for _ in range(new_tokens):
        if cache.length + fresh.shape[1] > window:
            fresh, cache.length = tokens[:, -max(1, window // 2) :], 0
        n = model(fresh, loops=loops, cache=cache)
        fresh = _pick(model.logits(n[:, -1]).float(), temperature, top_k, draw)
        tokens = torch.cat((tokens, fresh), 1)
        if stop is not None:
            ended |= fresh == stop
            if bool(ended.all()):
                break
    return tokens


def _pick(logits: Tensor, temperature: float, top_k: int, draw: torch.Generator) -> Tensor:
    """Draw one token per row: logits [B, vocab] -> int64 [B, 1].

    Raises Diverged where a logit is NaN, or the largest is infinite: from those nothing is drawn.
    """
    largest = logits.max(-1, keepdim=True).values
    if not bool(largest.isfinite().all()):
        raise Diverged(
            "the model's output is not finite, so no token can be drawn; use an earlier "
            "checkpoint, or a number of loops nearer to that of training"
        )
    if temperature < torch.finfo(torch.float32).tiny:  # 0, or rounded to it in float32
        return logits.argmax(-1, keepdim=True)
    if 0 < top_k < logits.shape[-1]:
        floor = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    shifted = logits - largest  # so that no temperature overflows
    return torch.multinomial((shifted / temperature).softmax(-1), 1, generator=draw)


class Continuations(NamedTuple):
    """Texts that begin with a prompt, and their sizes in tokens."""

    texts: list[str]
    prompt: int
    longest: int  # of the longest text, with the prompt
    window: int  # the most that the model reads at once


def generate(
    run: str,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    num_samples: int = 1,
    loops: int = 0,
    seed: int = 0,
    device: str = "auto",
    tokenizer: str = "",
) -> list[str]:
    """Return `num_samples` texts that begin with the prompt and that a run's model continues.

    Args:
        run: a run's folder or a checkpoint.
        prompt: text, or FILE:path to read it from a file. Of a prompt longer than the model's
            seq_len only the end is read.
        loops: loops to run; 0 runs those of training.
        tokenizer: of the token shards, where these named none; empty: the run's.

    The others are those of `sample`. Raises InputError for an empty prompt, a token the
    model has no embedding for, numbers out of range, or more than memory can hold.
    """
    return continue_prompt(
        run, prompt, tokens, temperature, top_k, num_samples, loops, seed, device, tokenizer
    ).texts


def continue_prompt(
    run: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    num_samples: int,
    loops: int,
    seed: int,
    device: str,
    tokenizer: str,
) -> Continuations:
    """Return the texts of `generate`, with their sizes."""
    limits = {
        "tokens": (tokens, 1, MAX_INT),
        "num_samples": (num_samples, 1, MAX_INT),
        "loops": (loops, 0, MAX_INT),
        "top_k": (top_k, 0, MAX_INT),
        "temperature": (temperature, 0, math.inf),
        "seed": (seed, 0, MAX_SEED),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise InputError(f"{name}={value}: must lie between {least} and {most}")
    prompt = _read_prompt(prompt)
    torch_device = pick_device(device, "device")
    ckpt = checkpoint.find(run)
    m = ckpt.config.model
    encoder = load_run_tokenizer(ckpt.described_in, tokenizer)
    ids = encoder.encode(prompt)
    if ids and max(ids) >= m.vocab_size:
        raise InputError(
            f"prompt: token {max(ids)} is outside the model's vocabulary of {m.vocab_size}"
        )
    check_generation(m, torch_device, num_samples, min(m.seq_len, len(ids) + tokens), loops)
    model = load_model(ckpt, torch_device)
    start = torch.tensor([ids], dtype=torch.long, device=torch_device).repeat(num_samples, 1)
    out = sample(
        model, start, tokens, temperature=temperature, top_k=top_k, loops=loops or None, seed=seed,
        stop=encoder.eot,
    )  # fmt: skip
    rows = out.tolist()
    if encoder.eot is not None:
        rows = [cut_after_stop(row, len(ids), encoder.eot) for row in rows]
    texts = [encoder.decode(row) for row in rows]
    return Continuations(texts, len(ids), max(map(len, rows)), m.seq_len)


def _read_prompt(prompt: str) -> str:
    """Return the prompt, read from the file where it is FILE:path."""
    if not prompt.startswith("FILE:"):
        return prompt
    what = f"prompt file {prompt[5:]!r}"
    text = read_bytes(user_path(prompt[5:], "prompt file"), what)
    with foreign(what, "give a text in UTF-8"):
        return text.decode()


def cut_after_stop(row: list[int], start: int, stop: int) -> list[int]:
    """Drop the tokens from the first `stop` at or after position `start`, the prompt's length.

    A batch is sampled until every row has a `stop`, so some rows continue after theirs.
    """
    return row[: row.index(stop, start)] if stop in row[start:] else row
