"""Published FP8 speedups with their conditions, as plain data: what the predictions of `advise` are held against."""
