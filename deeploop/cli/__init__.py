"""The command line: deeploop VERB; `deeploop --help` lists the verbs.

Each verb is a module of this package with `run(arguments)`, imported when it is called, so that
`--help` does not wait for torch.
"""

import difflib
import importlib
import io
import sys

from deeploop import __version__
from deeploop.cli.ranks import is_main_process
from deeploop.utils.errors import Diverged, InputError

VERBS = (
    "train", "generate", "eval", "data", "profile", "diagnose", "plan", "presets", "compare",
    "convert", "completion",
)  # fmt: skip

SMALLER = {  # by verb, the remedy where memory has run out
    "train": "lower train.micro_batch, model.seq_len or the model's size",
    "generate": "give fewer samples, tokens or loops",
    "eval": "give a smaller --batch-size or fewer --loops",
    "diagnose": "give fewer --sequences or a smaller model",
    "data": "give smaller files",
    "compare": "give fewer runs",
    "convert": "give a smaller model",
}

HELP = f"""deeploop {__version__}: train looped Transformers on fused kernels

  deeploop train [PRESET] [options]     train; without options: a small model on
                                        real text, under two minutes on two CPU cores
  deeploop generate RUN --prompt TEXT   continue a text with a trained model
  deeploop eval RUN --loops 1,2,4..32   held-out loss, change and exits by number of loops
  deeploop data INPUT OUT               tokenise text into shards, once
  deeploop data sudoku|maze|arc ...     write a data set of puzzles
  deeploop profile [PRESET] [options]   measure a training step's time and memory by component
  deeploop diagnose RUN|PRESET          measure how far the loops' gradients align
  deeploop plan [PRESET|RUN] [options]  predict memory, time and hours of a run
  deeploop presets                      list the named configurations
  deeploop compare RUN...               compare runs in one table and one picture
  deeploop convert RUN --loops R        start a looped model from a run without loops
  deeploop completion bash|zsh|fish     print a script that completes options in a shell

Each takes --help."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 2 for refused input, 1 for a diverged run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal cannot show
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0
    verb, *rest = arguments
    if verb == "--version":
        print(__version__)
        return 0
    from deeploop.utils.console import DroppingStream, say_error  # which imports rich

    if verb not in VERBS:
        say_error(f"deeploop {verb}: no such verb; {meant_verb(verb)}")
        return 2
    try:
        code, reason, *suggestions = run_verb(verb, rest)
    finally:
        if sys.stdout is not None:  # else Python exits with 120 where its own flush fails
            DroppingStream(sys.stdout).flush()
    if reason:
        say_error("\n  ".join([f"deeploop {verb}: {' '.join(reason.split())}", *suggestions]))
    return code


def meant_verb(word: str) -> str:
    """Return what the user of an unknown verb may have meant."""
    from deeploop.config.presets import presets

    near = difflib.get_close_matches(word, VERBS, n=1)
    if near:
        return f"did you mean deeploop {near[0]}?"
    if word in presets():
        return f"did you mean deeploop train {word}?"
    return f"use {', '.join(VERBS)}"


def run_verb(verb: str, arguments: list[str]) -> tuple[int, str, *tuple[str, ...]]:
    """Run a verb; returns the exit code and the sentence that says why it failed, or "".

    After the sentence on an unknown option come those that are like it, a string each.
    """
    try:
        code: int = importlib.import_module(f"deeploop.cli.{verb}").run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has gone
        return 141, ""
    except KeyboardInterrupt:
        return 130, "interrupted" if is_main_process() else ""
    except Diverged as error:
        return 1, str(error)
    except (InputError, OSError) as error:
        return 2, str(error), *getattr(error, "suggestions", ())
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return 2, f"{error}; {SMALLER.get(verb, SMALLER['train'])}"
    return code, ""


def out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed; on a CPU torch raises a plain RuntimeError for it."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)
