"""C libraries by ctypes, and our compiled copy."""
