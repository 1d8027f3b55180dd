"""The branch norm's projection leaves out what comes back from the second norm."""

FILE = "triton/branch_sandwich.py"
OLD = " - b_r2 * b_r2 * b_mean_2 * tl.sum(b_sum_h)"
NEW = ""
TESTS = ["interpreter/test_updates.py", "-k", "test_matches_reference and 4096 and branch"]
