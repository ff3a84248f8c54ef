"""A cluster in virtual time: the scheduler, cost model and eviction that serve, on simulated nodes."""
