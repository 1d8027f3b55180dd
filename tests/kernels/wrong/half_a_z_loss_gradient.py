"""The square's factor of two is missing in the z-loss gradient: right loss, wrong gradient."""

FILE = "triton/sigmoid_router.py"
OLD = '"per_row": 2.0 / max(1, n_rows)'
NEW = '"per_row": 1.0 / max(1, n_rows)'
TESTS = ["interpreter/test_moe.py", "-k", "test_router and (ties or subset)"]
