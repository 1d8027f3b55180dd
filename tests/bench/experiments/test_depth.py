"""The table of held-out loss by loops at test time."""

from bench.experiments import depth
from bench.experiments.runs import train


def test_a_run_gives_a_figure_for_each_number_of_loops_and_the_table_has_it():
    small = (
        " --model.d-model 8 --model.n-heads 1 --model.seq-len 16 --train.batch-size 2 "
        "--train.precision fp32 --train.eval-tokens 64"
    )
    rows = depth.cases(steps=2)
    results = {}
    for case in rows.values():
        result = train(f"{case}{small} --seed 0")
        results[f"{case} --seed 0"] = result
        assert len(result["val_loop_bits_per_byte"]) == len(depth.LOOPS)
        assert result["val_loop_bits_per_byte"][2] == result["val_bits_per_byte"]  # 4 loops
    lines = depth.by_loops(rows, results, depth.LOOPS, "val_loop_bits_per_byte").splitlines()
    first = results[f"{next(iter(rows.values()))} --seed 0"]["val_loop_bits_per_byte"]
    assert len(lines) == 2 + len(rows) and f"{first[0]:.2f}" in lines[2]
