"""Engine: plan -> processes -> rows. Pool, workers, shards, devices, progress and resume."""
