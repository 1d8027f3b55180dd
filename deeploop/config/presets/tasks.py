"""Models for generated tasks (`deeploop.data.tasks`), of sizes that a CPU trains; of no paper."""

from deeploop.config import Config, DataConfig, ModelConfig, TrainConfig


def task_presets() -> list[Config]:
    """List `reach-tiny`, one block that learns to follow one edge of a path in each loop.

    It is trained on paths of 1 to 4 hops, with drawn loops and the tokens mixed in again in each,
    and validated on 12 hops after 1 to 32 loops. bench/results has its accuracy by loops, beside
    that of the same model without injection and with fixed loops: 0.79 to 0.99 in three seeds
    after 32 loops, and 0.02 to 0.15.
    """
    return [
        Config(
            preset="reach-tiny",
            model=ModelConfig(
                residual="deeploop", d_model=64, n_layers=1, loops=4, n_heads=2, seq_len=24,
                inject="add",
            ),
            data=DataConfig(task="reach", difficulty="1-4", eval_difficulty="12"),
            train=TrainConfig(
                steps=1000, batch_size=32, loop_count="poisson", lr=3e-3, weight_decay=0.05,
                precision="fp32", eval_every=500, eval_loops="1,2,4,8,12,16,24,32",
            ),
        )
    ]  # fmt: skip
