"""Training: models, data, steps, whole runs and their loss curves. The suites `train` and `divergence` share all of it."""
