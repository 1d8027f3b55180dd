import pytest

from tests.helpers.data import train_bpe


@pytest.fixture
def cache(tmp_path) -> str:
    """A cache folder that does not exist yet."""
    return str(tmp_path / "cache")


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory):
    """A folder with GPT-2's two files of a small tokenizer."""
    return train_bpe(tmp_path_factory.mktemp("bpe"), "the block runs again " * 50, 300)
