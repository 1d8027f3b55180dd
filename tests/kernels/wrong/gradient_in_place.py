"""df is written over the incoming gradient, which someone else may still read."""

FILE = "triton/post_sandwich.py"
OLD = "df = torch.empty_like(f) if needs[1] else None"
NEW = "df = (torch.empty_like(f) if dn is None else dn) if needs[1] else None"
TESTS = ["interpreter/test_kernels.py", "-k", "test_same_bits_twice_and_gradients_left_alone"]
