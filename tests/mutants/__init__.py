"""The tests are tested: faults of the source, each of which a test must notice."""

from tests.mutants import kernels, models, training

MUTANTS = [*kernels.MUTANTS, *models.MUTANTS, *training.MUTANTS]
