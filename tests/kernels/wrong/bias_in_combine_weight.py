"""The balance bias, meant to steer the choice alone, leaks into the weights."""

FILE = "triton/sigmoid_router.py"
OLD = "b_one = tl.sum(tl.where(m_top, b_score, 0.0), axis=1)"
NEW = "b_one = tl.sum(tl.where(m_top, b_biased, 0.0), axis=1)"
TESTS = ["interpreter/test_moe.py", "-k", "test_router"]
