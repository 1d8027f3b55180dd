"""The gradient of the stream is dropped; only the branch input's comes through."""

FILE = "triton/post_sandwich.py"
OLD = "b_total = b_dh + b_r2 * (b_dnw - b_y2 * b_mean_2)"
NEW = "b_total = b_r2 * (b_dnw - b_y2 * b_mean_2)"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 3-96"]
