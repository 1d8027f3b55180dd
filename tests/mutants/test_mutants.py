"""Every mutant can be planted; in the slow suite, every one is killed."""

import pytest

from tests.mutants import MUTANTS
from tests.mutants.runner import run, run_unchanged, stale


def test_every_mutant_can_be_planted():
    assert [reason for mutant in MUTANTS if (reason := stale(mutant))] == []
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) and all(m.old != m.new for m in MUTANTS)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed(mutant):
    result = run(mutant)
    assert result.failed, f"{mutant.why}\n{result.output}"


@pytest.mark.slow
def test_the_source_without_a_fault_passes_in_the_same_place():
    """All tests above pass on an unchanged copy: they reject the faults and nothing else."""
    for result in run_unchanged(MUTANTS):
        assert result.code == 0, result.output
