"""Only the first program's share of a gain's gradient is kept."""

FILE = "rows.py"
OLD = "return partial.sum(0).to(w.dtype)"
NEW = "return partial[:1].sum(0).to(w.dtype)"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 129-96"]
