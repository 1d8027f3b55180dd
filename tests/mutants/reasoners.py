"""Faults of reasoners: the cycles, what has a gradient, their scales, loss, halting, optimizers."""

from tests.mutants.runner import Mutant

EQUATIONS = (
    "model/test_reasoner.py::test_states_logits_q_loss_and_all_gradients_are_those_of_the_equations"
)

MUTANTS = [
    Mutant(
        "low_without_the_input",
        "L does not get the input e",
        "deeploop/model/reasoner.py",
        "z_L = L(z_L, z_H + e, ",
        "z_L = L(z_L, z_H, ",
        EQUATIONS,
    ),
    Mutant(
        "high_with_gradient_in_every_cycle",
        "Calls of H before the last have gradients, too",
        "deeploop/model/reasoner.py",
        "has = cycle == r.cycles_high - 1 and (step == -1 or step >= first)",
        "has = step == -1 or (cycle == r.cycles_high - 1 and step >= first)",
        "model/test_reasoner.py::test_the_gradient_is_that_of_the_last_calls_alone",
    ),
    Mutant(
        "causal_reasoner",
        "Cells do not see later cells",
        "deeploop/model/reasoner.py",
        ", causal=False)",
        ")",
        EQUATIONS,
    ),
    Mutant(
        "carry_with_gradient",
        "The states of a segment keep their graph",
        "deeploop/model/reasoner.py",
        "Carry(z_H.detach(), z_L.detach())",
        "Carry(z_H, z_L)",
        "model/test_reasoner.py::test_a_carry_has_no_gradient_and_a_start_is_fixed",
    ),
    Mutant(
        "beta_on_queries",
        "beta multiplies Q and K, too",
        "deeploop/model/reasoner.py",
        'linear.weight[2 * d :] if name == "qkv" else linear.weight',
        "linear.weight",
        "model/test_reasoner.py::test_starting_weights_are_truncated_normals",
    ),
    Mutant(
        "mixer_normed_over_the_width",
        "The norm after a SwiGLU over positions is over the width",
        "deeploop/model/sublayer.py",
        "return isinstance(self.branch, PositionMixer)",
        "return False",
        EQUATIONS,
    ),
    Mutant(
        "scales_of_all_calls_of_low",
        "Counted scales count the calls of L without gradient",
        "deeploop/config/reasoner.py",
        'return self.cycles_low if self.visits == "paper" else self.low_calls',
        "return self.cycles_low",
        "config/test_reasoner.py::test_visits_that_the_scales_count",
    ),
    Mutant(
        "puzzle_gradients_not_summed",
        "A puzzle drawn twice takes the step of one of its sequences",
        "deeploop/model/puzzle_embedding.py",
        "(same @ grads.double())",
        "grads.double()",
        "model/test_reasoner.py::test_a_sign_step_is_the_dense_one_on_the_drawn_rows_and_two_ranks_are_one",
    ),
    Mutant(
        "loss_of_labels_not_sequences",
        "A sequence weighs as much as it has labels",
        "deeploop/train/losses/reasoner.py",
        "per_label.sum(-1) / labels.clamp(min=1)",
        "per_label.sum(-1) / labels.double().mean()",
        "train/test_reasoner_loss.py::test_a_segments_loss_is_of_sequences_over_the_whole_batch",
    ),
    Mutant(
        "evaluation_halts",
        "Evaluation ends a sequence where Q says so",
        "deeploop/train/halting.py",
        "if not training:",
        "if least is None and not training and False:",
        "train/test_reasoner_loss.py::test_halting_is_in_training_alone_and_waits_for_the_least",
    ),
    Mutant(
        "angle_of_corrected_moments",
        "The first moment's correction is inside of the angle",
        "deeploop/train/adam_atan2.py",
        "torch.atan2(exp_avg, angle, out=angle)",
        "torch.atan2(exp_avg / first[0].to(exp_avg), angle, out=angle).mul_(first[0].to(exp_avg))",
        "train/test_adam_atan2.py::test_a_hundred_steps_are_the_formulas",
    ),
    Mutant(
        "count_read_back",
        "The host waits for the device in an optimizer step",
        "deeploop/train/adam_atan2.py",
        "torch._foreach_add_(steps, [takes] * len(steps))",
        "torch._foreach_add_(steps, takes)",
        "train/test_reasoner_loss.py::test_steps_read_nothing_back_from_the_device",
    ),
    Mutant(
        "skipped_step_counts",
        "A step that is skipped counts for the corrections",
        "deeploop/train/adam_atan2.py",
        "torch._foreach_add_(steps, [takes] * len(steps))",
        "torch._foreach_add_(steps, 1.0)",
        "train/test_adam_atan2.py::test_a_step_that_is_not_finite_changes_nothing",
    ),
]
