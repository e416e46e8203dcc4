"""Training steps and what is built from them: the suites `train` and `divergence` share all of it."""
