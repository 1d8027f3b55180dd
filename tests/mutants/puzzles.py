"""Faults of puzzle data sets: their order, their boards and their augmentations."""

from tests.mutants.runner import Mutant

FOLDER = "deeploop/data/puzzles"
TESTS = "data/puzzles"

MUTANTS = [
    Mutant(
        "groups_in_the_same_order",
        "Each epoch has the order of groups of the first",
        f"{FOLDER}/order.py",
        "start ^ np.uint64(epoch)",
        "start ^ np.uint64(epoch * 0)",
        f"{TESTS}/test_order.py::test_groups_puzzles_and_examples_are_all_shuffled",
    ),
    Mutant(
        "ignored_labels_are_targets",
        "Labels to ignore count in the loss",
        f"{FOLDER}/puzzle_set.py",
        "targets[targets == ignored] = IGNORE",
        "pass",
        f"{TESTS}/test_puzzle_set.py::test_examples_are_those_of_the_files",
    ),
    Mutant(
        "a_size_is_trusted",
        "The shape in a file's header is not compared with the file",
        f"{FOLDER}/arrays.py",
        "if size != count * dtype.itemsize:",
        "if size < 0:",
        f"{TESTS}/test_puzzle_set.py::test_damaged_files_are_refused",
    ),
    Mutant(
        "a_second_solution",
        "A cell is emptied where two solutions follow",
        f"{FOLDER}/sudoku.py",
        "if len(solve(board, shape).solutions) == 1:",
        "if len(solve(board, shape).solutions) >= 1:",
        f"{TESTS}/test_sudoku.py::test_a_drawn_board_has_its_solution_alone",
    ),
    Mutant(
        "held_out_solutions_are_trained_on",
        "A transformed copy may have the solution of a test board",
        f"{FOLDER}/sudoku_set.py",
        "kept = [kind.tobytes() not in self.held_out for kind in kinds]",
        "kept = [True for _ in kinds]",
        f"{TESTS}/test_sudoku.py::test_no_solution_of_a_test_board_is_trained_on",
    ),
    Mutant(
        "rows_leave_their_bands",
        "Rows of a board that is no square of boxes are exchanged with the width of its boxes",
        f"{FOLDER}/sudoku.py",
        "_lines(draw, size, shape.height), _lines",
        "_lines(draw, size, shape.width), _lines",
        f"{TESTS}/test_sudoku.py::test_transformed_boards_have_the_transformed_solution_alone",
    ),
    Mutant(
        "turned_the_same_way_again",
        "A quarter turn is undone by itself",
        f"{FOLDER}/symmetries.py",
        "INVERSE = (0, 3, 2, 1,",
        "INVERSE = (0, 1, 2, 3,",
        f"{TESTS}/test_arc.py::test_an_augmentation_is_undone_by_its_name",
    ),
    Mutant(
        "answers_of_evaluation_are_trained_on",
        "Test examples of evaluation tasks are in the training split",
        f"{FOLDER}/arc_set.py",
        "if e.output is not None and not task.evaluation",
        "if e.output is not None",
        f"{TESTS}/test_arc.py::test_every_example_is_an_augmented_one_of_its_task",
    ),
]
