"""Sudoku: one solution each, transformations that keep it, and solutions that are held out."""

import numpy as np
import pytest

from deeploop.data.puzzles import open_both
from deeploop.data.puzzles.sudoku import (
    SHAPES,
    augment,
    classes,
    draw_puzzle,
    relabelled,
    solve,
)
from deeploop.data.puzzles.sudoku_set import _solved, build_sudoku, build_sudoku_csv
from deeploop.data.tasks.draw import Draw
from deeploop.utils.errors import InputError
from tests.helpers.puzzles import keys, write_csv

SIZES = pytest.mark.parametrize("size", [4, 6, 9])
GIVENS = {4: range(5, 7), 6: range(12, 15), 9: range(32, 37)}


def drawn(size, count):
    for key in keys(count):
        yield draw_puzzle(key[None], SHAPES[size], GIVENS[size])


def is_solved(grid, shape):
    """Rows, columns and boxes have each digit once, in the plainest words."""
    n, every = shape.size, set(range(1, shape.size + 1))
    grid = grid.reshape(n, n)
    boxes = [
        grid[r : r + shape.height, c : c + shape.width]
        for r in range(0, n, shape.height)
        for c in range(0, n, shape.width)
    ]
    return all(set(house.ravel().tolist()) == every for house in (*grid, *grid.T, *boxes))


def brute_force(board, shape):
    """All solutions, cell by cell in their order, without the solver's bits."""
    found, board = [], board.copy()

    def fill(cell):
        if cell == len(board):
            found.append(board.copy())
            return
        if board[cell]:
            return fill(cell + 1)
        peers = (shape.houses == shape.houses[cell]).any(1)
        for digit in set(range(1, shape.size + 1)) - set(board[peers].tolist()):
            board[cell] = digit
            fill(cell + 1)
            board[cell] = 0

    fill(0)
    return found


@SIZES
def test_a_drawn_board_has_its_solution_alone(size):
    shape = SHAPES[size]
    for board, solution in drawn(size, 3):
        assert is_solved(solution, shape) and (board[board > 0] == solution[board > 0]).all()
        assert size == 9 or len(brute_force(board, shape)) == 1
        assert [s.tolist() for s in solve(board, shape, 3).solutions] == [solution.tolist()]
        assert np.count_nonzero(board) in range(GIVENS[size].start, GIVENS[size].stop + 4)


def test_the_solver_agrees_with_brute_force_where_there_are_several_solutions():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        board = np.where(rng.random(16) < 0.25, rng.integers(1, 5, 16), 0).astype(np.uint8)
        shape = SHAPES[4]
        peers = [(shape.houses == shape.houses[c]).any(1) for c in range(16)]
        clash = any(board[c] and (board[peers[c]] == board[c]).sum() > 1 for c in range(16))
        wanted = [] if clash else brute_force(board, shape)
        got = solve(board, shape, limit=1000).solutions
        assert sorted(x.tolist() for x in got) == sorted(x.tolist() for x in wanted)
        assert len(solve(board, shape, limit=2).solutions) == min(2, len(wanted))


def test_backtracks_grade_a_board():
    board, _ = next(drawn(9, 1))
    easy, shape = solve(board, SHAPES[9], 1).solutions[0], SHAPES[9]
    easy[:9] = 0
    assert solve(easy, shape).backtracks == 0
    hard = np.zeros(81, np.uint8)
    given = "..53.....8......2..7..1.5..4....53...1..7...6..32...8..6.5....9..4....3......97.."
    hard[:] = [int(c) if c != "." else 0 for c in given]
    found = solve(hard, shape)
    assert found.backtracks > 50 and len(found.solutions) == 1


@SIZES
def test_transformed_boards_have_the_transformed_solution_alone(size):
    shape = SHAPES[size]
    both = np.stack(next(drawn(size, 1)))
    moved = augment(both, shape, Draw(keys(40), 0))
    assert moved.dtype == np.uint8 and moved.shape == (40, 2, size**2)
    assert len({x.tobytes() for x in moved}) > 30
    for board, solution in moved:
        assert is_solved(solution, shape) and np.count_nonzero(board) == np.count_nonzero(both[0])
        assert (board[board > 0] == solution[board > 0]).all()
    for board, solution in moved[:4]:
        assert [s.tolist() for s in solve(board, shape).solutions] == [solution.tolist()]


def test_square_boards_are_transposed_and_others_not():
    for size, kinds in ((9, 2), (6, 1)):
        rows = np.repeat(np.arange(1, size + 1), size).astype(np.uint8)[None]  # of equal cells
        moved = augment(rows, SHAPES[size], Draw(keys(30), 0)).reshape(30, size, size)
        assert len({bool((x[0] == x[0, 0]).all()) for x in moved}) == kinds


def test_4x4_has_12_classes_of_solutions():
    shape = SHAPES[4]
    every = solve(np.zeros(16, np.uint8), shape, limit=1000).solutions
    kinds = {x.tobytes() for x in relabelled(np.stack(every), shape)}
    assert len(every) == 288 and kinds == {x.tobytes() for x in classes(shape)}
    assert len(kinds) == 12
    board = every[100]
    names = np.array([0, 3, 1, 4, 2], np.uint8)
    assert (relabelled(names[board][None], shape) == relabelled(board[None], shape)).all()


@pytest.mark.parametrize(
    ("size", "puzzles", "test", "augmented"), [(4, 60, 30, 6), (6, 12, 6, 8), (9, 3, 2, 4)]
)
def test_no_solution_of_a_test_board_is_trained_on(tmp_path, size, puzzles, test, augmented):
    shape = SHAPES[size]
    options = {"size": size, "puzzles": puzzles, "test": test, "augment": augmented}
    build_sudoku(f"{tmp_path}/set", **options, seed=3)
    train, held_out = open_both(tmp_path / "set")
    assert (train.groups_count, held_out.groups_count) == (puzzles, test)
    assert puzzles < train.puzzles_count <= puzzles * (1 + augmented)
    assert (train.vocab_size, train.seq_len) == (size + 2, size**2)
    kinds = []
    for split in (train, held_out):
        inputs, labels = np.array(split.arrays.inputs) - 1, np.array(split.arrays.labels) - 1
        assert _solved(labels, shape).all() and all(is_solved(x, shape) for x in labels[:5])
        assert ((inputs == 0) | (inputs == labels)).all()
        kinds.append({x.tobytes() for x in relabelled(labels, shape)})
    assert not kinds[0] & kinds[1]
    first = np.array(train.arrays.inputs)[train.arrays.group_offsets[:-1]]
    assert len({x.tobytes() for x in first}) == puzzles
    assert ((first > 1).sum(1) == {4: 6, 6: 14, 9: 30}[size]).all()


def test_equal_options_write_equal_files(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        build_sudoku(str(folder), size=4, puzzles=20, test=5, augment=2, seed=seed)
    files = [sorted(p.relative_to(f) for p in f.rglob("*.*")) for f in folders]
    assert files[0] == files[1] and len(files[0]) == 13
    same = [(folders[0] / p).read_bytes() == (folders[1] / p).read_bytes() for p in files[0]]
    assert all(same)
    inputs = "train/all__inputs.npy"
    assert (folders[0] / inputs).read_bytes() != (folders[2] / inputs).read_bytes()


def test_grading(tmp_path):
    build_sudoku(f"{tmp_path}/a", size=6, puzzles=6, test=2, givens="10-12", backtracks=4)
    train, _ = open_both(tmp_path / "a")
    boards = np.array(train.arrays.inputs) - 1
    assert set(np.count_nonzero(boards, axis=1).tolist()) <= {10, 11, 12}
    assert all(solve(board, SHAPES[6]).backtracks >= 4 for board in boards)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 8}, "size=8: must be one of 4, 6, 9"),
        ({"givens": "16"}, "givens=16: a board of 9x9 with one solution has at least 17"),
        ({"givens": "few"}, "givens='few': must be a number"),
        ({"puzzles": 0}, "puzzles=0: must lie in 1"),
        ({"augment": -1}, "augment=-1"),
        ({"size": 4, "givens": "16", "test": 73}, "1 more boards are wanted"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, said):
    with pytest.raises(InputError, match=said):
        build_sudoku(f"{tmp_path}/set", **options)
    assert not list(tmp_path.iterdir())


def test_sudoku_extreme(tmp_path):
    rows = []
    for rating, (board, solution) in enumerate(drawn(9, 4)):
        question, answer = ("".join(map(str, x)) for x in (board, solution))
        rows.append(["puzzles0", question.replace("0", "."), answer, str(rating)])
    write_csv(tmp_path / "csv", rows)
    source = str(tmp_path / "csv")
    build_sudoku_csv(f"{tmp_path}/all", source)
    build_sudoku_csv(f"{tmp_path}/some", source, puzzles=2, test=1, rating=1, augment=3)
    train, test = open_both(tmp_path / "all")
    for split in (train, test):
        for i, (_, question, answer, _) in enumerate(rows):
            assert "".join(".123456789"[t - 1] for t in split.arrays.inputs[i]) == question
            assert "".join(".123456789"[t - 1] for t in split.arrays.labels[i]) == answer
    some, one = open_both(tmp_path / "some")
    assert (some.groups_count, some.puzzles_count, one.groups_count) == (2, 8, 1)
    kept = {x.tobytes() for x in train.arrays.inputs[1:]}
    firsts = some.arrays.inputs[some.arrays.group_offsets[:-1]]
    assert {x.tobytes() for x in firsts} <= kept
    assert _solved(np.array(some.arrays.labels) - 1, SHAPES[9]).all()
    with pytest.raises(InputError, match="rating=9: no board"):
        build_sudoku_csv(f"{tmp_path}/none", source, rating=9)


def test_a_damaged_csv_file_is_refused(tmp_path):
    board, solution = ("".join(map(str, x)) for x in next(drawn(9, 1)))
    swapped = solution[1] + solution[0] + solution[2:]
    good = ["x", board, solution, "1"]
    for rows, said in (
        ([good, ["x", board, swapped, "1"]], "the answer of board 2 is not a solution"),
        ([good, ["x", board[:-1], solution, "1"]], "line 3: has boards of 80 and 81 cells"),
        ([good, ["x", board, solution]], "line 3: has 3 columns, not 4"),
        ([good, ["x", board, "x" * 81, "1"]], "line 3: must have boards of the characters"),
        ([good, ["x", board, solution, "hard"]], "whole number as the rating"),
        ([good, ["x", "1", "1", "1"]], "line 3: has boards of 1 and 1 cells"),
        ([["x", "1", "1", "1"]], "has boards of 1 cells, not 81"),
        ([["x", '"' + board, solution, "1"]], "is not such a csv file"),
        ([], "has no boards"),
    ):
        write_csv(tmp_path / "csv", rows)
        with pytest.raises(InputError, match=said):
            build_sudoku_csv(f"{tmp_path}/set", str(tmp_path / "csv"))
    with pytest.raises(InputError, match=r"train\.csv: cannot be read"):
        build_sudoku_csv(f"{tmp_path}/set", str(tmp_path))
