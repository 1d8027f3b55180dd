"""Wrong kernels, each a small edit of a right one, that the tests must reject."""

from typing import NamedTuple


class Wrong(NamedTuple):
    """One edit of a kernel's source, and a test that must fail on it."""

    name: str
    why: str  # it is wrong
    file: str  # under kernels/
    old: str  # text that the file holds once
    new: str  # text in its place
    test: str  # node id under tests/kernels/, run under Triton's interpreter


POST = "triton/post_sandwich.py"
TILES = "triton/tiles.py"
ROUTER = "triton/sigmoid_router.py"
OP, ATEN = "_op.py", "_aten.py"
BRANCH = "triton/branch_sandwich.py"
COMBINE = "triton/expert_combine.py"
LINEAR = "triton/linear_update.py"
LOOPING = "looping_update.py"

WRONG = [
    Wrong(
        "alpha_missing_in_dh",
        "dh without alpha: right at alpha = 1, where a lazy test would look",
        POST,
        "store(dh_ptr + base, o, b_dz * alpha, m)",
        "store(dh_ptr + base, o, b_dz, m)",
        "interpreter/test_values.py::test_matches_reference[96-post_sandwich]",
    ),
    Wrong(
        "bias_in_combine_weight",
        "The balance bias, meant to steer the choice alone, leaks into the weights",
        ROUTER,
        "b_one = tl.sum(tl.where(m_top, b_logits, 0.0), axis=1)",
        "b_one = tl.sum(tl.where(m_top, b_biased, 0.0), axis=1)",
        "interpreter/test_router.py::test_dtypes[30-torch.float32]",
    ),
    Wrong(
        "branch_projection_stale",
        "The branch norm's projection leaves out what comes back from the second norm",
        BRANCH,
        " - b_r2 * b_r2 * b_mean_2 * tl.sum(b_sum_h)",
        "",
        "interpreter/test_values.py::test_matches_reference[4096-branch_sandwich]",
    ),
    Wrong(
        "coefficients_compiled_in",
        "Coefficients that torch.compile takes for constants: one compile for each value",
        OP,
        "one * value for value in values",
        "torch.tensor(value, dtype=torch.float64) for value in values",
        "test_compile.py::test_fullgraph_and_new_coefficients_compile_nothing[inject]",
    ),
    Wrong(
        "dropped_slot_read",
        "A dropped slot's row is read all the same, from in front of the experts' rows",
        COMBINE,
        "m_slot = b_slot >= 0",
        "m_slot = b_slot >= -1",
        "interpreter/test_combine.py::test_dropped_slots[24]",
    ),
    Wrong(
        "dy_ignored",
        "The gradient of the stream is dropped; only the branch input's comes through",
        POST,
        "b_total = b_dh + b_r2 * (b_dnw - b_y2 * b_mean_2)",
        "b_total = b_r2 * (b_dnw - b_y2 * b_mean_2)",
        "interpreter/test_values.py::test_matches_reference[96-post_sandwich]",
    ),
    Wrong(
        "fp16_accumulation",
        "The sum of squares in half precision: 255 squared is already infinite",
        TILES,
        "return 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / D + eps)",
        "return 1.0 / tl.sqrt(tl.sum((b_x * b_x).to(tl.float16), axis=1).to(tl.float32) / D + eps)",
        "interpreter/test_values.py::test_matches_reference[768-post_sandwich]",
    ),
    Wrong(
        "gain_missing_in_backward",
        "dn reaches h' without the gain of the norm it came through",
        POST,
        "b_dh, b_dn, b_dn * b_w_next",
        "b_dh, b_dn, b_dn",
        "interpreter/test_values.py::test_matches_reference[96-post_sandwich]",
    ),
    Wrong(
        "gradient_in_place",
        "df is written over the incoming gradient, which someone else may still read",
        POST,
        "df = torch.empty_like(f) if needs[1] else None",
        "df = (torch.empty_like(f) if dn is None else dn) if needs[1] else None",
        "interpreter/test_gradients.py::test_same_bits_twice_and_nothing_given_is_written[96-post_sandwich]",
    ),
    Wrong(
        "half_a_z_loss_gradient",
        "The square's factor of two is missing in the z-loss gradient: right loss, wrong gradient",
        ROUTER,
        '"per_row": 2.0 / max(1, n_rows)',
        '"per_row": 1.0 / max(1, n_rows)',
        "interpreter/test_router.py::test_every_subset_of_gradients[(0, 1)-8]",
    ),
    Wrong(
        "int32_offset",
        "Row offsets in 32 bits: beyond 2^31 elements they wrap",
        POST,
        "first = tl.program_id(0).to(tl.int64) * ROWS",
        "first = tl.program_id(0) * ROWS",
        "interpreter/test_offsets.py::test_offsets_past_two_to_the_31[post_sandwich]",
    ),
    Wrong(
        "last_column_dropped",
        "An off-by-one in the mask: the last value of every row is left out",
        TILES,
        "m = m_row[:, None] & (o_col < D)[None, :]",
        "m = m_row[:, None] & (o_col < D - 1)[None, :]",
        "interpreter/test_values.py::test_matches_reference[96-post_sandwich]",
    ),
    Wrong(
        "last_row_block_dropped",
        "The backward loops over whole blocks of rows only; a last partial one is skipped",
        POST,
        "tl.cdiv(n_rows, ROWS), tl.num_programs(0)",
        "n_rows // ROWS, tl.num_programs(0)",
        "interpreter/test_values.py::test_programs_share_the_rows[129-96-post_sandwich]",
    ),
    Wrong(
        "missing_mask",
        "The tile forgets where the row ends: neighbours are read, and written over",
        TILES,
        "m = m_row[:, None] & (o_col < D)[None, :]",
        "m = m_row[:, None] & (o_col < BLOCK)[None, :]",
        "interpreter/test_gradients.py::test_writes_each_result_once_and_nothing_else[19-96-post_sandwich]",
    ),
    Wrong(
        "partial_sums_lost",
        "Only the first program's share of a gain's gradient counts",
        ATEN,
        "partial.sum(0) if partial.dim() == 2",
        "partial[:1].sum(0) if partial.dim() == 2",
        "interpreter/test_values.py::test_programs_share_the_rows[129-96-post_sandwich]",
    ),
    Wrong(
        "readout_gradient_lost",
        "The gradient of the local memory misses that which comes through the global one",
        LINEAR,
        "b_dlocal += b_dglob * q",
        "b_dlocal += b_dglob * 0.0",
        "interpreter/test_values.py::test_matches_reference[96-looping_update_two-source_readout]",
    ),
    Wrong(
        "stale_rstd",
        "The second norm divides by the size of the row before the first one",
        POST,
        "b_r2 = rsqrt_mean(b_z * b_r1[:, None], D, eps)",
        "b_r2 = rsqrt_mean(b_z, D, eps)",
        "interpreter/test_values.py::test_matches_reference[96-post_sandwich]",
    ),
    Wrong(
        "tie_broken_upward",
        "Among equal scores the highest expert wins: ranks and kernels no longer agree",
        ROUTER,
        "b_index = tl.min(tl.where(b_key == b_top[:, None], o_e[None, :], BLOCK_E), axis=1)",
        "b_index = tl.max(tl.where(b_key == b_top[:, None], o_e[None, :], -1), axis=1)",
        "interpreter/test_router.py::test_ties_infinities_and_nan[3]",
    ),
    Wrong(
        "wrong_ema_normaliser",
        "The global memory divided by the writes of this loop, not by all it ever had",
        LOOPING,
        "1 / _weight((loop - 1) * n_layers + layer, decay)",
        "1 / _weight(layer, decay)",
        "test_looping.py::test_closed_form_is_the_definition[0.5]",
    ),
]
