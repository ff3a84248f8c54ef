"""Reads over UCX: RDMA where the library and the host have it, else its shared-memory and TCP transports."""
