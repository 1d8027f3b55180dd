"""dn reaches h' without the gain of the norm it came through."""

FILE = "post_sandwich.py"
OLD = "b_dnw = b_dn * load(w_next_ptr, o_gain, m)"
NEW = "b_dnw = b_dn"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 3-96"]
