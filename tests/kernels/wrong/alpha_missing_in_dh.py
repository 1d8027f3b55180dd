"""dh without alpha: right at alpha = 1, where a lazy test would look."""

FILE = "triton/post_sandwich.py"
OLD = "store(dh_ptr + base, o, b_dz * alpha, m)"
NEW = "store(dh_ptr + base, o, b_dz, m)"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 3-96"]
