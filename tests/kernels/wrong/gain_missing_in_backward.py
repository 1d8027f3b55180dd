"""dn reaches h' without the gain of the norm it came through."""

FILE = "triton/post_sandwich.py"
OLD = "b_dh, b_dn, b_dn * b_w_next"
NEW = "b_dh, b_dn, b_dn"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 3-96"]
