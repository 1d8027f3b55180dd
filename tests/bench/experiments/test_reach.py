"""The table of accuracy on longer paths by loops at test time."""

from bench.experiments import reach
from bench.experiments.depth import by_loops
from bench.experiments.runs import train


def test_each_case_is_trained_as_its_row_says_and_scored_after_each_number_of_loops():
    rows = reach.cases(steps=1)
    small = " --model.d-model 8 --model.n-heads 1 --train.batch-size 2 --train.eval-tokens 48"
    results = {}
    for case in rows.values():
        result = train(f"{case}{small} --seed 0")
        assert len(result["val_loop_accuracies"]) == len(reach.LOOPS)
        results[f"{case} --seed 0"] = result | {"val_loop_accuracies": [0.25] * len(reach.LOOPS)}
    lines = by_loops(rows, results, reach.LOOPS, "val_loop_accuracies").splitlines()
    assert len(lines) == 2 + len(rows) and lines[2].count("0.25") == len(reach.LOOPS)
