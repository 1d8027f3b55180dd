from deeploop.cli import main
from deeploop.config.presets import presets


def listed(capsys, *arguments):
    assert main(["presets", *arguments]) == 0
    return capsys.readouterr().out


def test_presets_are_listed_with_paper_size_and_loops(capsys):
    said = listed(capsys)
    rows = {line.split()[0]: line for line in said.splitlines()}
    for word in ("LOOM, 2610.01153", "330 M", " 12 ", "10 blocks", "6 of 30 experts"):
        assert word in rows["loom-329m"]
    assert "0.934 M" in rows["deeploop-tiny"] and "-released" in said.splitlines()[-1]
    assert "loom-tiny-released" not in rows


def test_all_lists_the_variants_too(capsys):
    rows = [line.split()[0] for line in listed(capsys, "--all").splitlines()[1:]]
    assert rows == list(presets())
