"""Beyond this machine: what a training step sends, holds and takes on up to thousands of GPUs, without any of them."""
