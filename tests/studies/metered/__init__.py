"""Every specialisation of the kernels that a step launches, metered in several processes: the rows of docs/kernels.md."""
