"""Training in parallel, one way at a time, against one process that does the same.

job         what is trained: a small Llama, its batches, and one process's losses as the reference
cells       the ways: DDP, FSDP2, tensor parallel, ... each as a function that makes ranks take training steps
bounds      how far a loss may lie from the reference's, and where that comes from
"""
