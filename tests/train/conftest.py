import io
import shutil

import pytest
from rich.console import Console

from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from tests.helpers.runs import small_run, write_corpus


@pytest.fixture(scope="session")
def finished_folder(tmp_path_factory):
    """The folder of the run of the fixture `config`, finished; tests take a copy."""
    run = small_run(write_corpus(tmp_path_factory.mktemp("finished")))
    open_run(run, Console(file=io.StringIO())).fit()
    return run.train.out


@pytest.fixture
def finished(config, finished_folder) -> checkpoint.Checkpoint:
    """The last checkpoint of the finished run of `config`, in a folder that a test may change."""
    shutil.copytree(finished_folder, config.train.out)
    return checkpoint.find(config.train.out)
