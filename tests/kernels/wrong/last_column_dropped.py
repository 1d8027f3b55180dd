"""An off-by-one in the mask: the last value of every row is left out."""

FILE = "triton/tiles.py"
OLD = "m = m_row[:, None] & (o_col < D)[None, :]"
NEW = "m = m_row[:, None] & (o_col < D - 1)[None, :]"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 3-96"]
