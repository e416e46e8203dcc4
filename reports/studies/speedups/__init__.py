"""Published FP8 speedups and throughputs with their conditions, as plain data: what the predictions of `advise` are held against."""
