"""Training runs: their plan, folder, checkpoints, figures, metrics, and the run itself."""
