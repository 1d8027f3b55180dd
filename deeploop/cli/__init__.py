"""The command line: deeploop train | generate | data | profile | diagnose | plan."""

import argparse
import contextlib
import dataclasses
import io
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from rich.console import Console

from deeploop import __version__
from deeploop.config import Config
from deeploop.config.presets import SUMMARY, preset, presets
from deeploop.utils.console import say
from deeploop.utils.errors import Diverged, InputError

if TYPE_CHECKING:  # torch is slow to import, and --help needs none of it
    from deeploop.train.trainer import Trainer
    from deeploop.utils.distributed import Ranks

T = TypeVar("T")

HELP = f"""deeploop {__version__}: train looped Transformers on fused kernels

  deeploop train [PRESET] [options]     train; without options: a small model on
                                        real text, under two minutes on two CPU cores
  deeploop generate RUN --prompt TEXT   continue a text with a trained model
  deeploop data INPUT OUT               tokenise text into shards, once
  deeploop profile [PRESET] [options]   where a training step's time and memory go
  deeploop diagnose RUN|PRESET          how far the loops' gradients align, visit by visit
  deeploop plan [PRESET] [options]      predict memory, time and hours of a run

Each takes --help."""


def parse(kind: type[T], **options: Any) -> T:
    """tyro.cli, its box about a bad argument made into one sentence."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        # The box: a title in its upper edge, what is wrong, and where help is.
        plain = re.sub(r"\x1b\[[\d;]*m", "", box.getvalue()).strip().partition("\n")[2]
        words = " ".join(re.sub(r"[\u2500-\u257f]|-{4,}", " ", plain).split())
        wrong = re.split(r" (?:Argument helptext|For full helptext)", words)[0].rstrip(".")
        raise InputError(f"{wrong}; see --help") from None


def split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The word ahead of the options, which names a preset or a run, if there is one; the rest."""
    named = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if named else (None, arguments)


def named_preset(name: str | None) -> Config:
    """A preset by name; without one, the default."""
    return preset("deeploop-tiny" if name is None else name)


@dataclasses.dataclass
class TrainArguments:
    config: Annotated[Config, tyro.conf.arg(name="")]
    resume: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="RUN",
            help="run folder or checkpoint to go on from; with --out, in a new folder",
        ),
    ] = None
    print_config: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="print the resolved configuration as JSON and stop"),
    ] = False


def parse_train(arguments: list[str]) -> TrainArguments:
    """PRESET and overrides; with --resume alone, the run's own configuration."""
    name, rest = split(arguments)
    base = named_preset(name)
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--resume", nargs="?")  # a missing value is for the real parser to refuse
    resume = ahead.parse_known_args(rest)[0].resume
    if resume is not None and name is None:
        from deeploop.runs.checkpoint import find

        saved = find(resume).config
        base = saved.replace("train", out="")
    return parse(
        TrainArguments,
        args=rest,
        default=TrainArguments(base),
        prog="deeploop train [PRESET]",
        description=f"Train a looped language model. Presets: {SUMMARY}.",
    )


def train(arguments: list[str]) -> int:
    parsed = parse_train(arguments)
    if parsed.print_config:
        print(parsed.config.to_json(), end="")
        return 0
    from deeploop.analyze.plan.fits import check_memory
    from deeploop.runs import checkpoint
    from deeploop.train.setup import describe, open_run
    from deeploop.utils.distributed import init_distributed

    found = None if parsed.resume is None else checkpoint.find(parsed.resume)
    with init_distributed() as place:
        console = Console(quiet=not place.is_main)
        check = check_memory if place.world == 1 else None
        trainer = together(place, lambda: open_run(parsed.config, console, found, place, check))
        if trainer is None:
            return 2
        for line in describe(trainer):
            say(console, line)
        if trainer.done == trainer.config.train.steps:
            console.print(f"already at step {trainer.done}; give more --steps to go on")
        summary = trainer.fit()
    if place.is_main:
        report(summary, trainer, console)
    return 128 + signal.Signals[summary["stopped_by"]] if "stopped_by" in summary else 0


def together(place: "Ranks", build: Callable[[], "Trainer"]) -> "Trainer | None":
    """What `build` makes, on every rank or on none; None where another rank refused.

    A rank that went on alone would wait for the others, and end in a traceback.
    """
    trainer, refused = None, None
    try:
        trainer = build()
    except InputError as error:
        refused = error
    if place.any_rank(refused is not None):
        if trainer is not None:
            trainer.lock.close()
        if refused is not None:
            raise refused
        return None
    return trainer


def report(summary: dict[str, Any], trainer: "Trainer", console: Console) -> None:
    """The last lines: what was reached, beside what n-gram counts reach, and a sample."""
    if "stopped_by" in summary:
        say(
            console,
            f"stopped by {summary['stopped_by']} after step {summary['step']}, saved; go on with: "
            f"deeploop train --resume {trainer.folder}",
        )
        return
    if summary["sample"] is not None:
        say(console, f"sample   {summary['sample']!r}")
    per_byte = trainer.corpus.bytes_per_token
    unit = "bits/byte" if per_byte else "bits/token"
    scale = 1 / math.log(2) / (per_byte or 1)
    floors = ", ".join(f"{name} {nats * scale:.3f}" for name, nats in trainer.floors.items())
    say(console, f"held out {summary['val_loss'] * scale:.3f} {unit} (counts alone: {floors})")
    rate = summary["tokens_per_second"]
    speed = f"{rate:,.0f} tokens/s, " if rate else ""
    say(console, f"took     {speed}{summary['peak_memory_gib']:.2f} GiB peak")


@dataclasses.dataclass
class GenerateArguments:
    run: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help="run folder or checkpoint", metavar="RUN")
    ]
    prompt: Annotated[str, tyro.conf.arg(help="text to continue; FILE:path reads a file")]
    tokens: Annotated[int, tyro.conf.arg(help="tokens to add")] = 200
    temperature: Annotated[float, tyro.conf.arg(help="0 is greedy")] = 0.8
    top_k: Annotated[int, tyro.conf.arg(help="choose among the k likeliest; 0: among all")] = 0
    num_samples: Annotated[int, tyro.conf.arg(help="continuations to print")] = 1
    loops: Annotated[int, tyro.conf.arg(help="loops to run; 0: as trained")] = 0
    seed: Annotated[int, tyro.conf.arg(help="seed of the draw")] = 0
    device: Annotated[str, tyro.conf.arg(help="auto, cpu, cuda or cuda:N")] = "auto"


def generate(arguments: list[str]) -> int:
    a = parse(
        GenerateArguments,
        args=arguments,
        prog="deeploop generate",
        description="Continue a text with a trained model.",
    )
    from deeploop.eval.generate import continue_text

    for text in continue_text(**dataclasses.asdict(a)):
        print(text)
    return 0


@dataclasses.dataclass
class DataArguments:
    input: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help=".txt, .jsonl or .parquet, or a folder of them", metavar="INPUT"),
    ]
    out: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help="folder for the shards", metavar="OUT")
    ]
    tokenizer: Annotated[str, tyro.conf.arg(help="byte, gpt2, gpt2:DIR, or a tokenizer.json")] = (
        "gpt2"
    )
    text_field: Annotated[str, tyro.conf.arg(help="field or column that holds the text")] = "text"
    val_fraction: Annotated[float, tyro.conf.arg(help="tail held out")] = 0.01
    shard_tokens: Annotated[int, tyro.conf.arg(help="tokens per shard")] = 100_000_000


def data(arguments: list[str]) -> int:
    a = parse(
        DataArguments,
        args=arguments,
        prog="deeploop data",
        description="Tokenise text into llm.c token shards.",
    )
    from deeploop.data.prepare import prepare

    meta = prepare(**dataclasses.asdict(a))
    tokens = meta["tokens"]
    print(
        f"{a.out}: {len(meta['shards'])} shards, {tokens['train']:,} training and "
        f"{tokens['val']:,} held-out tokens of a vocabulary of {meta['vocab_size']:,}; "
        f"go on with: deeploop train --data {a.out}"
    )
    return 0


@dataclasses.dataclass
class ProfileArguments:
    config: Annotated[Config, tyro.conf.arg(name="")]
    warmup: Annotated[int, tyro.conf.arg(help="steps before the timed ones")] = 3
    traced: Annotated[int, tyro.conf.arg(help="steps under the profiler, after the timed ones")] = 1


def profile(arguments: list[str]) -> int:
    name, rest = split(arguments)
    base = named_preset(name).replace("train", steps=5)
    a = parse(
        ProfileArguments,
        args=rest,
        default=ProfileArguments(base),
        prog="deeploop profile [PRESET]",
        description="Time training steps, then take one apart. --steps: how many are timed; "
        "--out: the folder, profiles/PRESET-TIME by default; tokens are random unless --data "
        f"names a corpus. Presets: {SUMMARY}.",
    )
    from deeploop.analyze.profile import profile
    from deeploop.train import setup
    from deeploop.utils.distributed import init_distributed

    steps = profile.Steps(a.warmup, a.config.train.steps, a.traced)
    with init_distributed() as place:
        console = Console(quiet=not place.is_main)
        trainer = together(place, lambda: profile.open_profile(a.config, steps, console, place))
        if trainer is None:
            return 2
        for line in setup.describe(trainer):
            say(console, line)
        figures = profile.profile(trainer, steps)
    if place.is_main:
        profile.report(figures, trainer.folder, console)
    return 0


@dataclasses.dataclass
class DiagnoseArguments:
    config: Annotated[Config, tyro.conf.arg(name="")]
    probes: Annotated[int, tyro.conf.arg(help="random probes of the Jacobian, a backward each")] = 4
    batch_size: Annotated[int, tyro.conf.arg(help="sequences; 0: the run's micro-batch")] = 0
    draw: Annotated[int, tyro.conf.arg(help="seed of the held-out sequences and the probes")] = 0


def diagnose(arguments: list[str]) -> int:
    name, rest = split(arguments)
    runs = None if name in presets() else name
    if runs is None:
        base = named_preset(name)
    else:
        from deeploop.runs.checkpoint import find

        if not os.path.exists(os.path.expanduser(runs)):
            raise InputError(
                f"{runs!r}: neither a run's folder or checkpoint nor a preset ({SUMMARY})"
            )
        base = find(runs).config.replace("train", out="", device="auto")
    a = parse(
        DiagnoseArguments,
        args=rest,
        default=DiagnoseArguments(base),
        prog="deeploop diagnose [RUN|PRESET]",
        description="Gradients of each visit apart, kappa_R, the stream and the update's size: of "
        "a preset as it begins, or of a run there and at each checkpoint it kept "
        "(train.keep 0 keeps all; train.save-every says how many). diagnose.json and "
        "diagnose.png go to the run's folder, or --out, over those of an earlier diagnosis; "
        f"without RUN and --out to runs/PRESET-TIME. Presets: {SUMMARY}.",
    )
    from deeploop.analyze.diagnose.diagnose import checkpoints, diagnose

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("WORLD_SIZE is over 1: a diagnosis takes one process; leave torchrun out")
    found = [] if runs is None else checkpoints(runs)
    diagnose(a.config, found, Console(), probes=a.probes, batch_size=a.batch_size, draw=a.draw)
    return 0


@dataclasses.dataclass
class PlanArguments:
    config: Annotated[Config, tyro.conf.arg(name="")]
    device: Annotated[str, tyro.conf.arg(help="h200, h100, a100, b200, or cpu: this machine")] = (
        "h200"
    )
    all: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="a line for every preset")
    ] = False
    matrix: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="DeepLoop's 16 runs and their sum, beside the paper's"),
    ] = False
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="print JSON")] = False


def plan(arguments: list[str]) -> int:
    name, rest = split(arguments)
    if name is None and "--matrix" in rest:
        base = preset("gpt2-small-r1-baseline")
    else:
        base = named_preset(name)
    a = parse_plan(rest, base)
    if name is not None and (a.all or a.matrix):
        raise InputError(f"preset {name!r}: --all and --matrix choose their own; leave it out")
    from deeploop.analyze.plan import planner

    if not (a.all or a.matrix):
        planner.show(a.config, a.device, a.json)
        return 0
    configs = planner.matrix() if a.matrix else list(presets().values())
    own = {"--all", "--matrix", "--json", "--device"}
    if any(word.startswith("--") and word.split("=")[0] not in own for word in rest):
        configs = [parse_plan(rest, config).config for config in configs]
    planner.show_many(configs, a.device, a.json, total=a.matrix)
    return 0


def parse_plan(arguments: list[str], base: Config) -> PlanArguments:
    """The options, and overrides of a configuration."""
    try:
        return parse(
            PlanArguments,
            args=arguments,
            default=PlanArguments(base),
            prog="deeploop plan [PRESET]",
            description="Predict memory, time and hours of a run; no GPU is needed, nothing "
            "allocated.",
        )
    except InputError as error:
        if not {"--all", "--matrix"} & set(arguments):
            raise
        raise InputError(f"{base.preset}: {error}") from None


VERBS = {
    "train": train, "generate": generate, "data": data, "profile": profile, "diagnose": diagnose,
    "plan": plan,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 2 for refused input, 1 for a diverged run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal cannot show
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in VERBS:
        print(f"deeploop {arguments[0]}: no such verb; use {', '.join(VERBS)}", file=sys.stderr)
        return 2
    try:
        return VERBS[arguments[0]](arguments[1:])
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        code, reason = 130, "interrupted"
    except Diverged as error:
        code, reason = 1, str(error)
    except (InputError, OSError) as error:
        code, reason = 2, str(error)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        code, reason = 2, f"{error}; lower train.micro_batch, model.seq_len or the model's size"
    print(f"deeploop {arguments[0]}: {' '.join(reason.split())}", file=sys.stderr)
    return code


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: numpy and CUDA have a type for that, torch on a CPU has not."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
