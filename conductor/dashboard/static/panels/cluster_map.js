// The cluster map: nodes in columns by role, the fill of their tiers, current transfers between them.
import { bytes, svg } from "../elements.js";
import { heldBy, holders, stateClass, stateOf } from "../nodes.js";

const ROLES = ["prefill", "both", "decode", "store"];
const compact = new Intl.NumberFormat("en", { notation: "compact" });
const WIDTH = 225, HEIGHT = 74, GAP = 18, LETTERS = 29; // of a node
const BAR = { x: 44, height: 6, step: 10, first: 43 };
const TOP = 26, MARGIN = 16, LEAST_BETWEEN = 190, MOST_BETWEEN = 420; // between two columns
const FRAME = 26, INSET = 8; // frame around the replicas of a node: its name above, a margin on the other sides
// Draw at most this many links, the busiest first, and label fewer, so that lines stay readable.
const LINKS = 120, LABELS = 10;

const heightOf = (node) => (node.replicas?.length ? FRAME + node.replicas.length * (HEIGHT + INSET) : HEIGHT);
const short = (name) => (name.length > LETTERS ? `${name.slice(0, LETTERS - 1)}…` : name);

// The frame and name around the replicas of one node.
function frame(node, x, y) {
  const group = svg("g", { transform: `translate(${x - INSET} ${y})`, class: `replicas ${stateClass(node)}`, "data-node": node.node_id });
  group.append(svg("title", {}, `${node.node_id}: ${stateOf(node)}`));
  group.append(svg("rect", { width: WIDTH + 2 * INSET, height: heightOf(node), rx: 9 }));
  group.append(svg("circle", { cx: 12 + INSET, cy: 14, r: 4 }));
  group.append(svg("text", { x: 22 + INSET, y: 18, class: "name" }, short(node.node_id)));
  const words = node.state === "partial" ? stateOf(node) : `${node.num_replicas} replicas`;
  group.append(svg("text", { x: WIDTH + INSET - 4, y: 18, class: "soft", "text-anchor": "end" }, words));
  return group;
}

function tierBar(tier, at) {
  const { x, height } = BAR, width = WIDTH - x - 12;
  const held = heldBy(tier);
  const share = tier.num_blocks ? Math.min(held / tier.num_blocks, 1) : 0;
  const group = svg("g");
  group.append(svg("title", {}, `${tier.name}: ${held} of ${tier.num_blocks} blocks`));
  group.append(svg("text", { x: 12, y: at + 6, class: "tier" }, tier.name));
  group.append(svg("rect", { x, y: at, width, height, rx: height / 2, class: "track" }));
  group.append(svg("rect", { x, y: at, width: width * share, height, rx: height / 2, class: "filled" }));
  return group;
}

function loadOf(node) {
  if (node.state !== "ready") return node.state;
  const { num_running: running = 0, num_waiting: waiting = 0, num_queued_tokens: queued = 0 } = node.load ?? {};
  return `${running} run, ${waiting} wait${queued ? `, ${compact.format(queued)} tokens queued` : ""}`;
}

function box(node, x, y) {
  const group = svg("g", { transform: `translate(${x} ${y})`, class: `node ${stateClass(node)}`, "data-node": node.node_id });
  const adapters = node.resident_adapters?.length ? [`${node.resident_adapters.length} adapters in memory`] : [];
  const facts = [`${node.node_id}: ${node.state}, ${loadOf(node)}`, ...adapters, ...(node.reasons ?? [])];
  group.append(svg("title", {}, facts.join("; ")));
  group.append(svg("rect", { width: WIDTH, height: HEIGHT, rx: 7 }));
  group.append(svg("circle", { cx: 12, cy: 15, r: 4 }));
  group.append(svg("text", { x: 22, y: 19, class: "name" }, short(node.node_id)));
  group.append(svg("text", { x: 22, y: 35, class: "soft" }, loadOf(node)));
  (node.tiers ?? []).slice(0, 3).forEach((tier, number) => group.append(tierBar(tier, BAR.first + number * BAR.step)));
  return group;
}

// The line between two nodes, with its current rate.
function link(route, places, labelled) {
  const from = places.get(route.source), to = places.get(route.target);
  const right = to.x > from.x, same = to.x === from.x;
  const x1 = from.x + (right || same ? WIDTH : 0), x2 = to.x + (right ? 0 : WIDTH);
  const y1 = from.y + HEIGHT / 2, y2 = to.y + HEIGHT / 2;
  const bend = same ? 50 : (x2 - x1) / 2, back = same ? -50 : bend;
  const told = `${route.source} to ${route.target}: ${bytes(route.rate)}/s`;
  const path = `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - back} ${y2} ${x2} ${y2}`;
  const line = svg("path", { d: path, class: route.rate ? "link moving" : "link" });
  line.style.strokeWidth = route.rate ? 1.5 + Math.min(6, Math.log10(1 + route.rate / 1e5)) : 1;
  line.append(svg("title", {}, told));
  if (!labelled) return { line, label: [] };
  // Place the label near the source if it is free: the middles of crossing lines coincide.
  const along = 0.3, rest = 1 - along;
  const at = (a, b, c, d) => rest ** 3 * a + 3 * rest ** 2 * along * b + 3 * rest * along ** 2 * c + along ** 3 * d;
  const label = svg("text", { x: at(x1, x1 + bend, x2 - back, x2), y: at(y1, y1, y2, y2) - 5, class: "rate", "text-anchor": "middle" }, `${bytes(route.rate)}/s`);
  label.append(svg("title", {}, told));
  return { line, label: [label] };
}

// Draw one role's nodes in a column at ``x``; returns their shapes and where the column ends.
function place(nodes, x, places) {
  const parts = [svg("text", { x, y: 15, class: "soft" }, `${nodes[0].role} (${nodes.length})`)];
  let y = TOP;
  for (const node of nodes) {
    const framed = node.replicas?.length;
    if (framed) parts.push(frame(node, x, y));
    holders(node).forEach((one, line) => {
      const at = framed ? y + FRAME + line * (HEIGHT + INSET) : y;
      places.set(one.node_id, { x, y: at });
      parts.push(box(one, x, at));
    });
    y += heightOf(node) + GAP;
  }
  return { parts, bottom: y };
}

// The nodes of each role that has any, in the order of a request's way.
export const byRole = (nodes) => ROLES.map((role) => nodes.filter((node) => node.role === role)).filter((column) => column.length);

// routes: [{source, target, rate}], rate in bytes/s.
export function drawMap(picture, nodes, routes) {
  const roles = byRole(nodes), room = picture.parentElement.clientWidth;
  const places = new Map(), parts = [];
  // Spread the columns over the width that there is.
  const spare = (room - 2 * MARGIN - roles.length * (WIDTH + 2 * INSET)) / Math.max(1, roles.length - 1);
  const between = Math.max(LEAST_BETWEEN, Math.min(spare, MOST_BETWEEN));
  let x = 1 + INSET, width = 0, height = TOP + HEIGHT;
  for (const column of roles) {
    const { parts: shapes, bottom } = place(column, x, places);
    parts.push(...shapes);
    width = x + WIDTH + INSET + 1;
    x += WIDTH + between;
    height = Math.max(height, bottom);
  }
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("width", width);
  picture.setAttribute("height", height);
  const shown = routes.filter((route) => places.has(route.source) && places.has(route.target))
    .sort((one, other) => other.rate - one.rate || other.nbytes - one.nbytes).slice(0, LINKS);
  const links = shown.map((route, at) => link(route, places, route.rate > 0 && at < LABELS));
  picture.replaceChildren(...links.map((one) => one.line), ...parts, ...links.flatMap((one) => one.label));
  const alive = nodes.filter((node) => node.state === "ready").length;
  picture.setAttribute("aria-label", `${nodes.length} nodes, ${alive} of them ready; Fleet lists them`);
  if (!nodes.length) picture.replaceChildren(svg("text", { x: 0, y: 15, class: "soft" }, "no node has registered"));
}
