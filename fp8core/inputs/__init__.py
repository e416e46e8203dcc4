"""Inputs: how the tensors of a layer become operands. Casts shared by layers, kept over microbatches, or cut by ranks."""
