"""Read and write the folder of a run: configuration, metrics, checkpoints, plots."""
