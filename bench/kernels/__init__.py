"""How fast the kernels are, beside others' own and beside what the machine gives, in one run."""
