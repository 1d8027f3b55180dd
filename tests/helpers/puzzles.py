"""Foreign files of puzzles: a set as HRM's and TRM's scripts write it, csv files, ARC's tasks."""

import json

import numpy as np

META = {
    "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 6, "seq_len": 4,
    "num_puzzle_identifiers": 4, "total_groups": 2, "mean_puzzle_examples": 5 / 3, "sets": ["all"],
}  # fmt: skip
# Two groups: puzzles 0 and 1 with two examples each, and puzzle 2 with one.
ARRAYS = {
    "inputs": np.arange(20).reshape(5, 4) % 6,
    "labels": (np.arange(20).reshape(5, 4) + 1) % 6,
    "puzzle_identifiers": np.array([1, 2, 3], np.int32),
    "puzzle_indices": np.array([0, 2, 4, 5], np.int32),
    "group_indices": np.array([0, 2, 3], np.int32),
}


def write_foreign(folder, dtype=np.uint8, meta=None, arrays=None, splits=("train", "test")):
    """Write a small set; `meta` and `arrays` take the place of some of its values, None: absent."""
    (folder / "identifiers.json").write_text(json.dumps(["<blank>", "a", "b", "c"]))
    for split in splits:
        (folder / split).mkdir()
        facts = META | (meta or {})
        facts = {name: value for name, value in facts.items() if value is not None}
        (folder / split / "dataset.json").write_text(json.dumps(facts))
        for name, array in (ARRAYS | (arrays or {})).items():
            if array is not None:
                values = array.astype(dtype) if name in ("inputs", "labels") else array
                np.save(folder / split / f"all__{name}.npy", values, allow_pickle=True)
    return folder


def keys(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 63, count, np.uint64)


def write_csv(folder, rows):
    """Write train.csv and test.csv with rows of source, question, answer and rating."""
    folder.mkdir(exist_ok=True)
    text = "source,question,answer,rating\n" + "".join(",".join(row) + "\n" for row in rows)
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text(text)


def grid(rng, most=6):
    return rng.integers(0, 10, rng.integers(1, most, 2)).tolist()


def task(seed, train=3, test=2):
    """A task of ARC with grids without any rule."""
    rng = np.random.default_rng(seed)
    return {
        split: [{"input": grid(rng), "output": grid(rng)} for _ in range(count)]
        for split, count in (("train", train), ("test", test))
    }


TASKS = {"training": {"aa": task(0), "bb": task(1, 2, 1)}, "evaluation": {"cc": task(2, 4, 2)}}


def write_tasks(folder, tasks=TASKS):
    """Write a file a task, as ARC's repositories have them; returns the folder's name."""
    for split, named in tasks.items():
        (folder / split).mkdir(parents=True)
        for name, values in named.items():
            (folder / split / f"{name}.json").write_text(json.dumps(values))
    return str(folder)
