"""Only the first program's share of a gain's gradient is kept."""

FILE = "rows.py"
OLD = "found.sum(0) if found.dim() == 2"
NEW = "found[:1].sum(0) if found.dim() == 2"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 129-96"]
