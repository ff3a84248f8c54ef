// The planner: how many nodes of each role there are, how many the load needs, and why; and requests that move.
import { byId, cell, fill, percent, row, say } from "../elements.js";

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
