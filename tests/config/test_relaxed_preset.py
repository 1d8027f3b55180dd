"""The preset of Relaxed Recursive Transformers."""

from deeploop.config.presets import SUMMARY, preset


def test_a_small_relaxed_model_shares_two_blocks_and_has_adapters_in_each_loop():
    m = preset("rrt-tiny").model
    assert (m.residual, m.n_layers, m.loops, m.lora_rank) == ("pre_norm", 2, 3, 8)
    assert "rrt-tiny" in SUMMARY
