// The cluster map: nodes in columns by role, the fill of their tiers, current transfers between them.
import { bytes, svg } from "../elements.js";
import { heldBy, holders, stateClass, stateOf } from "../nodes.js";

const ROLES = ["prefill", "decode", "store"];
const compact = new Intl.NumberFormat("en", { notation: "compact" });
// Two sizes of nodes: with all details, or small and in several columns if a role has many.
const ROOMY = { width: 225, height: 74, gap: 18, between: 190, column: Infinity, bar: { x: 44, height: 6, step: 10 }, first: 43, letters: 29 };
const DENSE = { width: 128, height: 44, gap: 8, between: 170, column: 580, bar: { x: 8, height: 3, step: 5 }, first: 27, letters: 15 };
const MANY = 8;
const TOP = 26, BESIDE = 12, MARGIN = 16, MOST_BETWEEN = 420;
const FRAME = 26, INSET = 8; // frame around the replicas of a node: its name above, a margin on the other sides
// Draw at most this many links, the busiest first, and label fewer, so that lines stay readable.
const LINKS = 120, LABELS = 10;

const heightOf = (node, size) => (node.replicas?.length ? FRAME + node.replicas.length * (size.height + INSET) : size.height);
const short = (name, letters) => (name.length > letters ? `${name.slice(0, letters - 1)}…` : name);

// The frame and name around the replicas of one node.
function frame(node, x, y, size) {
  const group = svg("g", { transform: `translate(${x - INSET} ${y})`, class: `replicas ${stateClass(node)}`, "data-node": node.node_id });
  group.append(svg("title", {}, `${node.node_id}: ${stateOf(node)}`));
  group.append(svg("rect", { width: size.width + 2 * INSET, height: heightOf(node, size), rx: 9 }));
  group.append(svg("circle", { cx: 12 + INSET, cy: 14, r: 4 }));
  group.append(svg("text", { x: 22 + INSET, y: 18, class: "name" }, short(node.node_id, size.letters)));
  const words = node.state === "partial" ? stateOf(node) : `${node.num_replicas} replicas`;
  if (size === ROOMY) group.append(svg("text", { x: size.width + INSET - 4, y: 18, class: "soft", "text-anchor": "end" }, words));
  return group;
}

function tierBar(tier, at, size) {
  const { x, height } = size.bar, width = size.width - x - 12;
  const held = heldBy(tier);
  const share = tier.num_blocks ? Math.min(held / tier.num_blocks, 1) : 0;
  const group = svg("g");
  group.append(svg("title", {}, `${tier.name}: ${held} of ${tier.num_blocks} blocks`));
  if (size === ROOMY) group.append(svg("text", { x: 12, y: at + 6, class: "tier" }, tier.name));
  group.append(svg("rect", { x, y: at, width, height, rx: height / 2, class: "track" }));
  group.append(svg("rect", { x, y: at, width: width * share, height, rx: height / 2, class: "filled" }));
  return group;
}

function loadOf(node, size) {
  if (node.state !== "ready") return node.state;
  const { num_running: running = 0, num_waiting: waiting = 0, num_queued_tokens: queued = 0 } = node.load ?? {};
  if (size === DENSE) return `${running}·${waiting}`;
  return `${running} run, ${waiting} wait${queued ? `, ${compact.format(queued)} tokens queued` : ""}`;
}

function box(node, x, y, size) {
  const group = svg("g", { transform: `translate(${x} ${y})`, class: `node ${stateClass(node)}`, "data-node": node.node_id });
  const adapters = node.resident_adapters?.length ? [`${node.resident_adapters.length} adapters in memory`] : [];
  const facts = [`${node.node_id}: ${node.state}, ${loadOf(node, ROOMY)}`, ...adapters, ...(node.reasons ?? [])];
  group.append(svg("title", {}, facts.join("; ")));
  group.append(svg("rect", { width: size.width, height: size.height, rx: 7 }));
  group.append(svg("circle", { cx: 12, cy: 15, r: 4 }));
  group.append(svg("text", { x: 22, y: 19, class: "name" }, short(node.node_id, size.letters)));
  const words = loadOf(node, size);
  group.append(size === DENSE
    ? svg("text", { x: size.width - 8, y: 19, class: "tier", "text-anchor": "end" }, words)
    : svg("text", { x: 22, y: 35, class: "soft" }, words));
  (node.tiers ?? []).slice(0, 3).forEach((tier, number) => group.append(tierBar(tier, size.first + number * size.bar.step, size)));
  return group;
}

// The line between two nodes, with its current rate.
function link(route, places, size, labelled) {
  const from = places.get(route.source), to = places.get(route.target);
  const right = to.x > from.x, same = to.x === from.x;
  const x1 = from.x + (right || same ? size.width : 0), x2 = to.x + (right ? 0 : size.width);
  const y1 = from.y + size.height / 2, y2 = to.y + size.height / 2;
  const bend = same ? 50 : (x2 - x1) / 2, back = same ? -50 : bend;
  const told = `${route.source} to ${route.target}: ${bytes(route.rate)}/s`;
  const path = `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - back} ${y2} ${x2} ${y2}`;
  const line = svg("path", { d: path, class: route.rate ? "link moving" : "link" });
  line.style.strokeWidth = route.rate ? 1.5 + Math.min(6, Math.log10(1 + route.rate / 1e5)) : 1;
  line.append(svg("title", {}, told));
  if (!labelled) return { line, label: [] };
  // Place the label near the source if it is free: the middles of crossing lines coincide.
  const along = size === DENSE ? 0.5 : 0.3, rest = 1 - along;
  const at = (a, b, c, d) => rest ** 3 * a + 3 * rest ** 2 * along * b + 3 * rest * along ** 2 * c + along ** 3 * d;
  const label = svg("text", { x: at(x1, x1 + bend, x2 - back, x2), y: at(y1, y1, y2, y2) - 5, class: "rate", "text-anchor": "middle" }, `${bytes(route.rate)}/s`);
  label.append(svg("title", {}, told));
  return { line, label: [label] };
}

// Draw one role's nodes from ``x`` on; returns their shapes and the next free ``x``.
function place(nodes, x, size, places) {
  const parts = [svg("text", { x, y: 15, class: "soft" }, `${nodes[0].role} (${nodes.length})`)];
  let y = TOP, bottom = TOP;
  for (const node of nodes) {
    const height = heightOf(node, size), framed = node.replicas?.length;
    if (y > TOP && y + height > TOP + size.column) { x += size.width + BESIDE + (framed ? 2 * INSET : 0); y = TOP; }
    if (framed) parts.push(frame(node, x, y, size));
    holders(node).forEach((one, line) => {
      const at = framed ? y + FRAME + line * (size.height + INSET) : y;
      places.set(one.node_id, { x, y: at });
      parts.push(box(one, x, at, size));
    });
    y += height + size.gap;
    bottom = Math.max(bottom, y);
  }
  return { parts, right: x + size.width, bottom };
}

// The nodes of each role that has any, in the order of a request's way.
export const byRole = (nodes) => ROLES.map((role) => nodes.filter((node) => node.role === role)).filter((column) => column.length);

// routes: [{source, target, rate}], rate in bytes/s.
export function drawMap(picture, nodes, routes) {
  const roles = byRole(nodes), room = picture.parentElement.clientWidth;
  const size = roles.some((column) => column.length > MANY) ? DENSE : ROOMY;
  const places = new Map(), parts = [];
  // Spread a few columns over the width that there is.
  const spare = (room - 2 * MARGIN - roles.length * (size.width + 2 * INSET)) / Math.max(1, roles.length - 1);
  const between = size === ROOMY ? Math.max(size.between, Math.min(spare, MOST_BETWEEN)) : size.between;
  let x = 1 + INSET, width = 0, height = TOP + size.height;
  for (const column of roles) {
    const placed = place(column, x, size, places);
    parts.push(...placed.parts);
    width = placed.right + INSET + 1;
    x = placed.right + between;
    height = Math.max(height, placed.bottom);
  }
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("width", width);
  picture.setAttribute("height", height);
  const shown = routes.filter((route) => places.has(route.source) && places.has(route.target))
    .sort((one, other) => other.rate - one.rate || other.nbytes - one.nbytes).slice(0, LINKS);
  const links = shown.map((route, at) => link(route, places, size, route.rate > 0 && at < LABELS));
  picture.replaceChildren(...links.map((one) => one.line), ...parts, ...links.flatMap((one) => one.label));
  const alive = nodes.filter((node) => node.state === "ready").length;
  picture.setAttribute("aria-label", `${nodes.length} nodes, ${alive} of them ready; Fleet lists them`);
  if (!nodes.length) picture.replaceChildren(svg("text", { x: 0, y: 15, class: "soft" }, "no node has registered"));
}
