"""Faults of the evaluation by loop, and of the pictures of a run."""

from tests.mutants.runner import Mutant

BY_LOOP, STARTS = "deeploop/eval/by_loop.py", "deeploop/eval/path_independence.py"
FIGURES = "eval/test_by_loop.py::test_figures_are_their_definitions"

MUTANTS = [
    Mutant(
        "normed_for_the_next_loop",
        "The head reads a state that is normed for the loop after",
        "deeploop/eval/validate.py",
        "read(done, s._replace(n=None))",
        "read(done, s)",
        "eval/test_by_loop.py::test_the_state_after_t_of_more_loops_is_that_of_a_forward_of_t_loops",
    ),
    Mutant(
        "divergence_the_other_way",
        "KL(p_{t-1} || p_t) in the place of KL(p_t || p_{t-1})",
        BY_LOOP,
        "kl = (p * (now - then)).sum(-1)",
        "kl = (then.exp() * (then - now)).sum(-1)",
        FIGURES,
    ),
    Mutant(
        "padding_counts",
        "Figures of padding are in the means",
        BY_LOOP,
        "keep = targets != IGNORE",
        "keep = targets == targets",
        FIGURES,
    ),
    Mutant(
        "a_loop_too_early",
        "A token leaves once its likeliest token is that of one loop before",
        BY_LOOP,
        "unchanged[back:] &= same[:-back]",
        "unchanged[back:] |= same[:-back]",
        FIGURES,
    ),
    Mutant(
        "never_leaves",
        "A token that no rule lets go leaves after the first loop",
        BY_LOOP,
        "met[-1] = True",
        "pass",
        "eval/test_by_loop.py::test_a_token_leaves_at_the_first_loop_that_its_rule_allows",
    ),
    Mutant(
        "one_noise",
        "All starts have the same noise",
        STARTS,
        "sequence_keys(0, j,",
        "sequence_keys(0, 0,",
        "eval/test_path_independence.py::test_no_two_starts_are_equal",
    ),
    Mutant(
        "ones_own_end",
        "A sequence goes on from its own end state",
        STARTS,
        "end.roll(j, 0)",
        "end.roll(0, 0)",
        "eval/test_path_independence.py::test_a_sequence_goes_on_from_the_end_states_of_others",
    ),
    Mutant(
        "last_loops_as_the_first",
        "Losses of a step's last loops are drawn as those of its first",
        "deeploop/runs/plots.py",
        "return range(last - count + 1, last + 1)",
        "return range(1, count + 1)",
        "runs/test_plots.py::test_losses_by_loop_have_a_panel_each",
    ),
]
