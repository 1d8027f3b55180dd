import io
import os
from pathlib import Path

import pytest
from hypothesis import settings
from matplotlib.figure import Figure
from rich.console import Console

from deeploop.config import Config
from tests.helpers.runs import small_run, write_corpus

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("deeploop", deadline=None)
settings.load_profile("deeploop")

# Files whose tests take long or share a fixture that does. One worker starts with them, and the
# other takes tests from the end of its list once its own are done: the last ones are short.
LONG = ("test_readmes", "test_distributed", "test_interpreter", "test_traffic", "test_trainer_loom")


def pytest_collection_modifyitems(items):
    """Put the long tests first."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Spread the tests over two workers of one thread each, unless the command line says more."""
    workers = getattr(config.option, "numprocesses", 0)  # absent without pytest-xdist
    option = config.option
    alone = option.usepdb or option.trace or option.collectonly or option.capture == "no"
    alone = alone or "PYTEST_XDIST_WORKER" in os.environ
    if workers is None and not alone and config.option.dist == "no":
        config.option.numprocesses, config.option.dist = 2, "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def short_sample():
    """Sample 8 tokens at the end of a run: 200 would take most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deeploop.train.language.SAMPLE_TOKENS", 8)
        yield


def write_first_bytes(figure, file, **options):
    """Write the first bytes of a PNG to a file or a path, as Figure.savefig writes all."""
    (file.write if hasattr(file, "write") else Path(file).write_bytes)(b"\x89PNG\r\n")


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    """Draw nothing: a picture takes longer than a short run. Yields the savefig that draws."""
    with pytest.MonkeyPatch.context() as patch:
        savefig = Figure.savefig
        patch.setattr(Figure, "savefig", write_first_bytes)
        yield savefig


@pytest.fixture
def pictures(no_pictures, monkeypatch):
    """Draw pictures, in a test of them."""
    monkeypatch.setattr(Figure, "savefig", no_pictures)


@pytest.fixture
def corpus_file(tmp_path):
    """A small text with structure enough to learn from."""
    return write_corpus(tmp_path)


@pytest.fixture
def config(tmp_path, corpus_file) -> Config:
    """A run of a second: one block, two loops, on `corpus_file`, into tmp_path/run."""
    return small_run(corpus_file)


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)
