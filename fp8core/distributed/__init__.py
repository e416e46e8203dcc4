"""FP8 training on several devices."""
