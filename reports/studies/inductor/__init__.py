"""What Inductor makes of FP8 training: its kernels and the bytes that they move, counted without a GPU.

`python reports/studies/compiled_casts.py` compiles each case for an H100 that is not there, reads the schedule of the code that
Inductor generates for it, and writes reports/published/studies/compiled-casts.md. Nothing is run, so nothing is timed.
"""
