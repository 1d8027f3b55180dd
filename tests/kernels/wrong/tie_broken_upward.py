"""Among equal scores the highest expert wins: ranks and kernels no longer agree."""

FILE = "triton/sigmoid_router.py"
OLD = "b_index = tl.min(tl.where(b_key == b_top[:, None], o_e[None, :], BLOCK_E), axis=1)"
NEW = "b_index = tl.max(tl.where(b_key == b_top[:, None], o_e[None, :], -1), axis=1)"
TESTS = ["interpreter/test_moe.py", "-k", "test_router and (ties or subset)"]
