"""Attention over the paged KV pool and related operations, each in the fastest form for its device.

``moonpool.kernels.dispatch`` has every operation, ``moonpool.kernels.reference`` documents the signatures.
Importing this package loads neither torch nor the compiled library, so that
``python -m moonpool.kernels.cpu.build`` can compile the library first.
"""
