"""What reaches the local memory through the global one is forgotten."""

FILE = "triton/linear_update.py"
OLD = "b_dlocal += b_dglob * q"
NEW = "b_dlocal += b_dglob * 0.0"
TESTS = ["interpreter/test_updates.py", "-k", "test_matches_reference and 96 and readout"]
