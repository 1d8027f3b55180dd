"""Coefficients that torch.compile takes for constants: one compile for each value."""

FILE = "_op.py"
OLD = "one * value for value in values"
NEW = "torch.tensor(value, dtype=torch.float64) for value in values"
TESTS = ["test_updates.py", "-k", "new_coefficients and inject"]
