"""The size of a cluster for a described workload: by formulas, checked by the simulator."""
