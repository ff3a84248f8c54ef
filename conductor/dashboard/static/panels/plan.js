// What becomes of the nodes: how many of each role the load needs, and why; requests that move, models and canaries.
import { byId, cell, fill, format, percent, row, say } from "../elements.js";

export function drawPlan(planner) {
  if (!planner) return; // a snapshot of an older version
  const would = planner.mode === "act" ? "" : "would ";
  const steps = planner.steps.map((step) => `${would}${step.kind} ${step.node_id || `a ${step.role} node`}`);
  say(byId("planner"), [planner.state, ...(planner.mode === "off" ? [] : [`mode ${planner.mode}`]), ...steps].join("; "));
  fill(byId("plan"), Object.entries(planner.roles).map(([role, state]) => row(role, state.ready, state.starting,
    state.needed, state.target ?? "–", state.attained == null ? "–" : percent(state.attained),
    cell([state.reason ?? state.why, state.held, joins(state.join)].filter(Boolean).join("; "), "soft"))));
}

// Running requests on their way to another decode node.
export function drawMoves(moves) {
  const several = moves ?? [];
  byId("moves").hidden = several.length === 0;
  fill(byId("moves").querySelector("table"), several.map((one) => row(one.request_id, one.source, one.target, one.cause, cell(one.reason, "soft"))));
}

// Where the time of a role's slowest start goes.
function joins(phases) {
  const parts = Object.entries(phases ?? {}).map(([phase, seconds]) => `${phase.replace("_", " ")} ${seconds.toFixed(2)} s`);
  return parts.length ? `joins: ${parts.join(", ")}` : "";
}

// The models of a cluster with several: what each has idle while others lack nodes, and what was lent.
export function drawModels(models) {
  const several = models ?? [];
  byId("models").hidden = several.length === 0;
  fill(byId("models").querySelector("table"), several.map((one) => row(one.name, one.num_nodes, one.num_idle ?? "–", one.num_requests,
    cell(one.queues ? "yes" : "no"), cell(format.format(Math.round(one.stranded_node_s ?? 0)), "number"), cell(one.loan ?? "", "soft"))));
}

const failed = ({ errors, requests }) => (requests ? `${percent(errors / requests)} of ${format.format(requests)} failed` : "no requests");

// Models that are tried beside others, in a sentence each.
export function canariesOf(cluster) {
  return (cluster?.canaries ?? []).filter((one) => one.state === "running").map(({ name, candidate, share, sides, verdict }) =>
    `Canary of ${name}: ${candidate} with ${share} %, ${failed(sides.candidate)}, before ${failed(sides.stable)}: ${verdict}`).join("; ");
}
