"""A dropped slot's row is read all the same, from in front of the experts' rows."""

FILE = "triton/expert_combine.py"
OLD = "m_slot = b_slot >= 0"
NEW = "m_slot = b_slot >= -1"
TESTS = ["interpreter/test_moe.py", "-k", "dropped_slots"]
