"""Pictures of runs stay readable from one loop to hundreds."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from deeploop.runs import plots
from deeploop.utils.figures import Line, shaded_lines


def metrics(loops, segments=1):
    return [
        {
            "step": step,
            "loss": 5 - step / 50 + step % 2,
            "residual_rms": [1 + 0.01 * i for i in range(loops)],
        }
        | ({"segment_losses": [5.0 - i for i in range(segments)]} if segments > 1 else {})
        | ({"val_loss": 4.0} if step == 50 else {})
        for step in range(1, 51)
    ]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, instead of files."""
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    return figures


@pytest.mark.parametrize(("loops", "bars"), [(1, 0), (4, 0), (200, 1)])
def test_few_loops_have_a_legend_and_many_a_colour_bar(loops, bars, drawn, tmp_path):
    plots.loops(metrics(loops), tmp_path / "loops.png")
    (figure,) = drawn
    axes, *bar = figure.axes
    assert len(bar) == bars and len(axes.get_lines()) == loops
    assert (axes.get_legend() is None) == bool(bars)
    if bars:
        assert bar[0].get_ylim() == (1, 200) and bar[0].get_ylabel() == "loop"


def lines_of(axes):
    """By the number that names it, each line's steps and values."""
    return {
        int(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_a_loops_line_has_every_step_that_ran_it(drawn, tmp_path):
    """With a drawn number of loops the lists of two steps differ in length."""
    drawn_loops = [3, 1, 4, 2]
    metrics = [
        {"step": 10 * i, "loops": n, "residual_rms": [float(10 * i + t) for t in range(1, n + 1)]}
        for i, n in enumerate(drawn_loops, 1)
    ]
    plots.loops(metrics, tmp_path / "loops.png")
    assert lines_of(drawn[0].axes[0]) == {
        1: ([10, 20, 30, 40], [11, 21, 31, 41]),
        2: ([10, 30, 40], [12, 32, 42]),
        3: ([10, 30], [13, 33]),
        4: ([30], [34]),
    }


def test_losses_by_loop_have_a_panel_each(drawn, tmp_path):
    """Of a step's last segment, its last loops; of a validation, those that were asked for."""
    metrics = [
        {"step": 1, "loops": 4, "residual_rms": [1.0] * 4, "loop_losses": [3.0, 2.0]},
        {"step": 2, "loops": 3, "residual_rms": [1.0] * 3, "loop_losses": [2.5, None]},
        {"step": 2, "val_loss": 2.0, "val_loops": [1, 8], "val_loop_losses": [4.0, None]},
        {"step": 3, "val_loss": 2.0, "val_loops": [1, 8], "val_loop_losses": [3.0, 5.0]},
    ]
    plots.loops(metrics, tmp_path / "loops.png")
    stream, training, held_out = drawn[0].axes
    assert len(stream.get_lines()) == 4
    assert lines_of(training) == {2: ([2], [2.5]), 3: ([1], [3]), 4: ([1], [2])}
    assert lines_of(held_out) == {1: ([2, 3], [4, 3]), 8: ([3], [5])}
    assert "held-out loss" in held_out.get_title() and "training loss" in training.get_title()


def test_experts_have_their_panels_after_the_losses(drawn, tmp_path):
    line = {"step": 1, "loops": 2, "residual_rms": [1.0, 1.0], "loop_losses": [3.0, 2.0],
            "load_spread": [0.1, 0.2], "router_overlap": [[1.0, 0.5], [0.5, 1.0]]}  # fmt: skip
    plots.loops([line], tmp_path / "loops.png")
    titles = [axes.get_title() for axes in drawn[0].axes if axes.get_title()]
    assert [t.split()[0] for t in titles] == ["RMS", "training", "std", "cosine"]


def test_the_loss_has_a_title_and_a_smoothed_curve(drawn, tmp_path):
    folder = tmp_path / "my-run"
    plots.loss(metrics(2), {"unigram": 3.0}, folder / "loss.png")
    axes = drawn[0].axes[0]
    assert axes.get_title() == "loss of my-run"
    raw, smooth = (line.get_ydata() for line in axes.get_lines()[:2])
    assert np.abs(np.diff(smooth[2:-2])).max() < 0.5 * np.abs(np.diff(raw)).min()
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["training", "held out"]


def test_many_segments_have_one_name(drawn, tmp_path):
    plots.loss(metrics(20, segments=10), {}, tmp_path / "loss.png")
    names = [t.get_text() for t in drawn[0].axes[0].get_legend().get_texts()]
    assert names == [
        "training, segments 1 to 9: dark to light", "training, segment 10 (last)", "held out",
    ]  # fmt: skip


def test_a_mean_is_over_equally_many_values_to_either_side():
    assert plots.smoothed([0.0, 3.0, 6.0, 0.0], 1) == [0, 3, 3, 0]
    assert plots.smoothed([1.0, 2.0], 0) == [1, 2]


def test_equal_numbers_can_be_drawn():
    axes = Figure().subplots()
    shaded_lines(axes, [Line(3, [1], [2])], "step")
    assert len(axes.get_lines()) == 1
