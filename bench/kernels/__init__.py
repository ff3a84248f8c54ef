"""Speed of the kernels, beside other libraries' and beside the machine's limits, in one run."""
