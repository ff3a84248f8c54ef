"""Prometheus metrics of the planner. Those of roles are there also without it: autoscalers read them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_OF_ROLE = ["model_name", "role"]

leads = Gauge(
    "moonpool_planner_leads", "1: this conductor plans the number of nodes; 0: another one, or none"
)
needed = Gauge("moonpool_planner_needed_nodes", "Nodes that the load needs, by role", _OF_ROLE)
targets = Gauge("moonpool_planner_target_nodes", "Nodes that the planner wants, by role", _OF_ROLE)
steps = Counter(
    "moonpool_planner_steps_total",
    "Changes the planner decided, by kind (add, remove, switch, lend), role and outcome (made, "
    "advised, refused, failed, abandoned)",
    ["kind", "role", "outcome"],
)
given_up = Counter(
    "moonpool_planner_given_up_nodes_total",
    "Nodes that never registered, cannot serve here, or kept leaving",
    ["role"],
)
queue_seconds = Gauge(
    "moonpool_role_queue_seconds",
    "Predicted wait of a request that comes now, on average over the nodes of a role (prefill, decode, both)",
    _OF_ROLE,
)
woken_seconds = Histogram(
    "moonpool_planner_woken_seconds",
    "Time from the first request for a model without a node until nodes served it (planner.min_warm=0)",
    buckets=(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
stranded = Counter(
    "moonpool_stranded_capacity_node_seconds_total",
    "Nodes of a model without a request, times seconds, while another model has fewer nodes than its load "
    "needs. Every conductor counts what it sees: take the largest",
    ["model_name"],
)
attained = Gauge(
    "moonpool_role_slo_attained_ratio",
    "Fraction of the last requests within the SLO that a role decides (prefill: TTFT, decode: TBT); "
    "1 where too few were seen",
    _OF_ROLE,
)
kv_free = Gauge(
    "moonpool_role_kv_free_ratio",
    "Blocks that sequences do not hold, of all pools of a role (prefill, decode, both)",
    _OF_ROLE,
)
join_seconds = Gauge("moonpool_role_join_seconds", "How long its last nodes took to join, by role", _OF_ROLE)
join_phase_seconds = Gauge(
    "moonpool_role_join_phase_seconds",
    "Longest of the role's nodes in each phase of their start (process, weights, warm_up, services, "
    "registration), and from then to their first token (first_token)",
    ["model_name", "role", "phase"],
)
