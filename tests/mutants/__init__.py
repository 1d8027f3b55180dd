"""The tests are tested: faults of the source, each of which a test must notice."""

from tests.mutants import evaluation, kernels, models, puzzles, reasoners, routing, training

MUTANTS = [
    *evaluation.MUTANTS,
    *kernels.MUTANTS,
    *models.MUTANTS,
    *puzzles.MUTANTS,
    *reasoners.MUTANTS,
    *routing.MUTANTS,
    *training.MUTANTS,
]
