// The nodes of a snapshot, with those that were lost a moment ago.

const LOST_SHOWN_S = 120; // how long a node stays listed after its lease has ended
const REMEMBERED = 4096;

const roles = new Map(); // roles of all nodes seen, also of lost ones
const nodeOf = new Map(); // node of every replica seen

export function stateClass(node) {
  return { ready: "good", partial: "warn", draining: "warn", gated: "warn", starting: "warn" }[node.state] ?? "bad";
}

// Text: how many replicas of a node serve.
export function stateOf(node) {
  return node.state === "partial" ? `${node.num_serving} of ${node.num_replicas} serve` : node.state;
}

// Text: its region, with its zone if it has one.
export const regionOf = (node) => [node.region, node.zone].filter(Boolean).join("/");

// Everything with a name of its own: replicas, or nodes without replicas.
export const holders = (node) => (node.replicas?.length ? node.replicas : [node]);

const collator = new Intl.Collator("en", { numeric: true });
export const byName = (one, other) => collator.compare(one.node_id, other.node_id);
export const compareNames = collator.compare;

// Blocks that a tier holds: in use, and kept for later.
export const heldBy = (tier) => (tier.num_used_blocks ?? 0) + (tier.num_cached_blocks ?? 0);

// Current and lost nodes, by name. Call it with every snapshot, so that the roles of lost nodes are known.
export function seeNodes(now) {
  const all = now.cluster.nodes.flatMap((node) => [node, ...(node.replicas ?? [])]);
  const present = new Set(all.map((node) => node.node_id));
  const lost = new Map();
  for (const event of now.events) {
    const role = roles.get(event.node);
    // A missing replica shows in its node's state while a sibling is present.
    if (present.has(nodeOf.get(event.node))) continue;
    if (event.kind === "left" && event.text !== "left" && role && !present.has(event.node)
      && now.unix_s - event.unix_s < LOST_SHOWN_S) {
      lost.set(event.node, { node_id: event.node, role, state: "lost", host: "", pid: "" });
    }
  }
  if (roles.size > REMEMBERED) {
    roles.clear();
    nodeOf.clear();
  }
  for (const node of now.cluster.nodes) {
    for (const one of holders(node)) {
      roles.set(one.node_id, one.role);
      nodeOf.set(one.node_id, node.node_id);
    }
  }
  return [...now.cluster.nodes, ...lost.values()].sort(byName);
}
