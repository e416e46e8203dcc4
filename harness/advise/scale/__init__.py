"""Beyond this machine: a training job on up to thousands of GPUs, and what each of them must hold."""
