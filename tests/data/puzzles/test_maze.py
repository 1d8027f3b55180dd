"""Mazes: the labels mark the only way, and no maze is trained on in another form of a test maze."""

import numpy as np
import pytest

from deeploop.data.puzzles import open_both, symmetries
from deeploop.data.puzzles.maze import FREE, GOAL, START, WALL, WAY, draw_maze
from deeploop.data.puzzles.maze_set import build_maze, build_maze_csv, forms
from deeploop.utils.errors import InputError
from tests.helpers.puzzles import keys, write_csv


def ways(maze):
    """All ways from start to goal that visit no place twice, as sets of places."""
    side = len(maze)
    start, goal = (tuple(np.argwhere(maze == x)[0]) for x in (START, GOAL))
    found = []

    def walk(place, visited):
        if place == goal:
            found.append(visited)
            return
        for step in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            after = place[0] + step[0], place[1] + step[1]
            inside = 0 <= after[0] < side and 0 <= after[1] < side
            if inside and maze[after] != WALL and after not in visited:
                walk(after, visited | {after})

    walk(start, frozenset([start]))
    return found


@pytest.mark.parametrize("side", [5, 8, 13])
def test_the_label_marks_the_only_way(side):
    for key in keys(10):
        maze, label = (x.reshape(side, side) for x in draw_maze(key[None], side, 4))
        (way,) = ways(maze)
        assert len(way) - 1 >= 4
        marked = {tuple(x) for x in np.argwhere(label == WAY)}
        assert marked == {p for p in way if maze[p] == FREE}
        same = label != WAY
        assert (label[same] == maze[same]).all() and (maze[~same] == FREE).all()
        edges = (maze[0], maze[-1], maze[:, 0], maze[:, -1])
        assert all((edge == WALL).all() for edge in edges)
        free = (maze[1:-1:2, 1:-1:2][: (side - 1) // 2, : (side - 1) // 2]) != WALL
        assert free.all()


def test_a_way_is_as_long_as_wanted():
    drawn = [draw_maze(key[None], 9, 16) for key in keys(40)]
    lengths = [int((both[1] == WAY).sum()) + 1 for both in drawn if both is not None]
    assert len(lengths) > 10 and min(lengths) >= 16
    assert draw_maze(keys(1), 5, 30) is None


def test_symmetries():
    grid = np.arange(6).reshape(2, 3)
    every = [symmetries.transform(grid, i) for i in range(8)]
    assert len({(x.shape, x.tobytes()) for x in map(np.ascontiguousarray, every)}) == 8
    for i, moved in enumerate(every):
        assert (symmetries.undo(moved, i) == grid).all()
    assert every[1].tolist() == [[2, 5], [1, 4], [0, 3]]
    assert every[4].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert every[5].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert every[6].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert every[7].tolist() == [[5, 2], [4, 1], [3, 0]]


@pytest.mark.parametrize("augment", [False, True])
def test_no_maze_is_another_one_turned(tmp_path, augment):
    build_maze(f"{tmp_path}/a", side=7, puzzles=40, test=10, augment=augment, seed=1)
    build_maze(f"{tmp_path}/b", side=7, puzzles=40, test=10, augment=augment, seed=1)
    train, test = open_both(tmp_path / "a")
    assert train.puzzles_count == 40 * (8 if augment else 1) and test.puzzles_count == 10
    firsts = [*train.arrays.inputs[train.arrays.group_offsets[:-1]], *test.arrays.inputs]
    assert len({min(x.tobytes() for x in forms(maze)) for maze in firsts}) == 50
    for i in range(0, train.puzzles_count, 7):
        maze, label = (x[i].reshape(7, 7) for x in (train.arrays.inputs, train.arrays.labels))
        (way,) = ways(maze)
        assert {tuple(x) for x in np.argwhere(label == WAY)} == {p for p in way if maze[p] == FREE}
    assert train.identity() == open_both(tmp_path / "b")[0].identity()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"side": 4}, "side=4: must lie in 5 .. 63"),
        ({"side": 5, "steps": 99}, "side=5, steps=99: 200 more mazes are wanted"),
        ({"puzzles": 0}, "puzzles=0"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, said):
    with pytest.raises(InputError, match=said):
        build_maze(f"{tmp_path}/set", **options)


def test_maze_hard(tmp_path):
    maze, label = draw_maze(keys(1), 9, 9)
    text = ["".join(" # SGo"[t] if t != 2 else " " for t in x) for x in (maze, label)]
    assert set(text[1]) == set("# SGo")
    write_csv(tmp_path / "csv", [["", *text, "9"]])
    build_maze_csv(f"{tmp_path}/set", str(tmp_path / "csv"), augment=True)
    train, test = open_both(tmp_path / "set")
    assert (train.arrays.inputs == forms(maze)).all()
    assert (train.arrays.labels == forms(label)).all() and (test.arrays.labels[0] == label).all()
    write_csv(tmp_path / "csv", [["", text[0][:-1], text[1][:-1], "9"]])
    with pytest.raises(InputError, match="mazes have 80 tokens in train"):
        build_maze_csv(f"{tmp_path}/other", str(tmp_path / "csv"))
