"""Public kernel bugs, and the test that keeps each of them out of here.

Not every project's bug can happen in ours (no autotuner, no cache folder of our own, no
sparse path); those that can are listed with their report and with tests that fail where
the bug is put back. The table is checked: a test that is renamed or deleted is missed.
"""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

BUGS = {
    "a backward that writes over grad_output breaks the sandwich (Liger-Kernel #370, #376)": [
        "test_ops.py::test_nothing_aliases_and_gradients_stay_as_they_were",
        "interpreter/test_kernels.py::test_same_bits_twice_and_gradients_left_alone",
    ],
    "gradients made in place corrupt saved tensors (Liger-Kernel #272, tritonbench #486)": [
        "test_updates.py::test_nothing_aliases_and_gradients_stay_as_they_were",
        "test_expert_combine.py::test_same_bits_twice_no_aliases_and_gradients_left_alone",
    ],
    "a gain's gradient is always None, or from an overwritten one (unsloth #4533)": [
        "test_ops.py::test_matches_reference",
        "test_updates.py::test_matches_reference",
    ],
    "a frozen gain still pays for its gradient, or crashes (Liger-Kernel #1067)": [
        "test_ops.py::test_frozen_gains_ask_for_no_gain_gradient",
        "test_updates.py::test_frozen_gains_ask_for_no_gain_gradient",
    ],
    "the residual gets no gradient when one output is unused (quack #52)": [
        "test_ops.py::test_every_subset_of_gradients",
        "interpreter/test_kernels.py::test_every_subset_of_gradients",
        "test_expert_combine.py::test_every_subset_of_gradients",
    ],
    "the expanded gradient of .sum() fails or gives NaN (quack #88, FlagGems #1082)": [
        "test_ops.py::test_gradient_of_a_sum",
        "interpreter/test_kernels.py::test_strided_and_expanded",
        "interpreter/test_updates.py::test_strided_and_expanded",
    ],
    "an expanded gain is read out of bounds (Primus-Turbo #343)": [
        "test_ops.py::test_strides",
        "interpreter/test_kernels.py::test_strided_and_expanded",
    ],
    "32-bit offsets wrap past 2^31 elements (Liger-Kernel #803, fla #1080, megablocks #185)": [
        "interpreter/test_int64.py::test_offsets_past_two_to_the_31",
        "interpreter/test_updates_int64.py::test_offsets_past_two_to_the_31",
        "interpreter/test_moe.py::test_combine_offsets_past_two_to_the_31",
        "test_gpu.py::test_offsets_past_two_to_the_31",
    ],
    "partial sums are allocated for fewer programs than run (attorch #18)": [
        "interpreter/test_kernels.py::test_no_write_out_of_bounds",
        "interpreter/test_updates.py::test_no_write_out_of_bounds",
    ],
    "the backward takes its input for two-dimensional (FlagGems #5392)": [
        "test_ops.py::test_matches_reference",
        "test_sigmoid_router.py::test_no_bias_and_more_dimensions",
        "test_expert_combine.py::test_more_dimensions_and_both_index_types",
    ],
    "zero rows end in a late device error (flash-attention #1620)": [
        "interpreter/test_kernels.py::test_matches_reference",
        "test_ops.py::test_matches_reference",
    ],
    "a new compiler spills registers at some widths (Liger-Kernel #801)": [
        "test_aot.py::test_wide_rows_do_not_spill",
        "test_aot.py::test_planted_faults_are_refused",
    ],
    "partial sums grow with the rows and are added up serially (Fast-LLM #499)": [
        "interpreter/test_kernels.py::test_programs_share_the_rows",
        "interpreter/test_updates.py::test_programs_share_the_rows",
    ],
    "a half-precision sum of squares overflows (pytorch #133085, SGLang #27540)": [
        "test_ops.py::test_large_float16_values_do_not_overflow",
        "test_updates.py::test_large_float16_values_do_not_overflow",
    ],
    "the kernel is launched on the current device, not the tensors' (Liger-Kernel #1303)": [
        "test_gpu.py::test_every_device_is_launched_on",
    ],
    "torch.compile breaks on an opaque launch (flashinfer #2733)": [
        "test_compile.py::test_fullgraph_matches_eager_over_row_counts",
        "test_updates.py::test_opcheck",
        "test_sigmoid_router.py::test_opcheck",
        "test_expert_combine.py::test_opcheck",
    ],
    "compiled norms that share a gain get wrong gradients (pytorch #193061)": [
        "test_compile.py::test_two_loops_sharing_a_gain",
    ],
    "float32 gains promote the output, autocast moves a norm (transformers #30236)": [
        "test_ops.py::test_autocast_changes_nothing",
        "test_ops.py::test_low_precision_branches_on_a_float32_stream",
        "test_updates.py::test_memories_and_stream_keep_their_dtypes",
    ],
    "rows past the last expert's are garbage and poison what reads them (pytorch #154557)": [
        "test_expert_combine.py::test_matches_the_dense_combine",
        "interpreter/test_moe.py::test_combine_dropped_slots",
    ],
    "equal scores route differently in kernel and reference (vLLM #52679)": [
        "test_sigmoid_router.py::test_equal_scores_go_to_the_lower_expert",
        "interpreter/test_moe.py::test_router_ties_infinities_and_nan",
    ],
    "bfloat16 router logits change the experts (SGLang #33764)": [
        "test_sigmoid_router.py::test_autocast_does_not_reach_the_router",
        "test_sigmoid_router.py::test_fast_matrix_products_do_not_reach_the_router",
    ],
    "atomics in the combine change its bits from run to run (vLLM #53440)": [
        "test_expert_combine.py::test_same_bits_twice_no_aliases_and_gradients_left_alone",
        "interpreter/test_moe.py::test_combine_strides_same_bits_and_gradients_left_alone",
        "test_aot.py::test_planted_faults_are_refused",
    ],
    "the interpreter's bfloat16 arithmetic is wrong (triton #4972)": [
        "interpreter/test_kernels.py::test_bfloat16",
        "interpreter/test_updates.py::test_bfloat16",
    ],
    "right loss, wrong router gradient (transformers #48687)": [
        "test_sigmoid_router.py::test_matches_the_dense_router",
        "interpreter/test_moe.py::test_router_every_subset_of_gradients",
    ],
    "checkpointed recomputation gives other gradients (NeMo Automodel #3247)": [
        "test_ops.py::test_checkpoint_is_bitwise_equal",
        "test_updates.py::test_checkpoint_is_bitwise_equal",
    ],
}


def functions_of(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("bug", BUGS)
def test_the_tests_against_a_public_bug_are_there(bug):
    for test in BUGS[bug]:
        file, name = test.split("::")
        assert name in functions_of(HERE / file), f"{test} is gone"
