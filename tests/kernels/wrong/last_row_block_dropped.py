"""The backward loops over whole blocks of rows only; a last partial one is skipped."""

FILE = "triton/post_sandwich.py"
OLD = "tl.cdiv(n_rows, ROWS), tl.num_programs(0)"
NEW = "n_rows // ROWS, tl.num_programs(0)"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 129-96"]
