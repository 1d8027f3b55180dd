"""The tile forgets where the row ends: neighbours are read, and written over."""

FILE = "triton/tiles.py"
OLD = "m = m_row[:, None] & (o_col < D)[None, :]"
NEW = "m = m_row[:, None] & (o_col < BLOCK)[None, :]"
TESTS = ["interpreter/test_kernels.py", "-k", "test_no_write_out_of_bounds and 1000"]
