"""How fast the CPU kernels are, beside torch's own and beside what memory gives, in one run."""
