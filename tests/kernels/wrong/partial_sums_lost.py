"""Only the first program's share of a gain's gradient is kept."""

FILE = "_aten.py"
OLD = "partial.sum(0) if partial.dim() == 2"
NEW = "partial[:1].sum(0) if partial.dim() == 2"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 129-96"]
