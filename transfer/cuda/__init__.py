"""Memory of CUDA devices: moved between processes by CUDA IPC, or through pinned host memory."""
