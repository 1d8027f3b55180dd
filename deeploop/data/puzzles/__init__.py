"""Puzzle data sets in HRM's and TRM's format: read, written, and built of Sudoku, mazes and ARC."""

from deeploop.data.puzzles.puzzle_set import Examples, PuzzleSet, open_both, open_puzzles

__all__ = ["Examples", "PuzzleSet", "open_both", "open_puzzles"]
