"""The sum of squares in half precision: 255 squared is already infinite."""

FILE = "triton/tiles.py"
OLD = "return 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / D + eps)"
NEW = "return 1.0 / tl.sqrt(tl.sum((b_x * b_x).to(tl.float16), axis=1).to(tl.float32) / D + eps)"
TESTS = ["interpreter/test_kernels.py", "-k", "test_matches_reference and float32 and 3-768"]
