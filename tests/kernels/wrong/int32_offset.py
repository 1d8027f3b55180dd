"""Row offsets in 32 bits: beyond 2^31 elements they wrap."""

FILE = "triton/post_sandwich.py"
OLD = "first = tl.program_id(0).to(tl.int64) * ROWS"
NEW = "first = tl.program_id(0) * ROWS"
TESTS = ["interpreter/test_int64.py", "-k", "post_sandwich"]
