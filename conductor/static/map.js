// Nodes in columns by role, tiers filling, and what moves between them just now.
import { byId, bytes, element, svg } from "./draw.js";

const ROLES = ["prefill", "decode", "store"];
const compact = new Intl.NumberFormat("en", { notation: "compact" });
const WIDTH = 225, HEIGHT = 74, GAP = 18, BETWEEN = 190, TOP = 26;
const FRAME = 26, INSET = 8; // around the replicas of a node: above them its name, beside and below them a margin

export function stateClass(node) {
  return { ready: "good", partial: "warn", draining: "warn", starting: "warn" }[node.state] ?? "bad";
}

// In words: of a node of several replicas, how many serve.
export function stateOf(node) {
  return node.state === "partial" ? `${node.num_serving} of ${node.num_replicas} serve` : node.state;
}

// What moves blocks and takes requests under its own name.
export const holders = (node) => (node.replicas?.length ? node.replicas : [node]);

const heightOf = (node) => (node.replicas?.length ? FRAME + node.replicas.length * (HEIGHT + INSET) : HEIGHT);

// Around the replicas of one node, with its name.
function frame(node, x, y) {
  const group = svg("g", { transform: `translate(${x - INSET} ${y})`, class: `replicas ${stateClass(node)}`, "data-node": node.node_id });
  group.append(svg("title", {}, `${node.node_id}: ${stateOf(node)}`));
  group.append(svg("rect", { width: WIDTH + 2 * INSET, height: heightOf(node), rx: 9 }));
  group.append(svg("circle", { cx: 12 + INSET, cy: 14, r: 4 }));
  group.append(svg("text", { x: 22 + INSET, y: 18, class: "name" }, node.node_id));
  const words = node.state === "partial" ? stateOf(node) : `${node.num_replicas} replicas`;
  group.append(svg("text", { x: WIDTH + INSET - 4, y: 18, class: "soft", "text-anchor": "end" }, words));
  return group;
}

function box(node, x, y) {
  const group = svg("g", { transform: `translate(${x} ${y})`, class: `node ${stateClass(node)}`, "data-node": node.node_id });
  group.append(svg("title", {}, [`${node.node_id}: ${node.state}`, ...(node.reasons ?? [])].join("; ")));
  group.append(svg("rect", { width: WIDTH, height: HEIGHT, rx: 7 }));
  group.append(svg("circle", { cx: 12, cy: 15, r: 4 }));
  group.append(svg("text", { x: 22, y: 19, class: "name" }, node.node_id));
  const load = node.load ?? {};
  const queued = load.num_queued_tokens ? `, ${compact.format(load.num_queued_tokens)} tokens queued` : "";
  const words = node.state === "ready" ? `${load.num_running ?? 0} run, ${load.num_waiting ?? 0} wait${queued}` : node.state;
  group.append(svg("text", { x: 22, y: 35, class: "soft" }, words));
  (node.tiers ?? []).slice(0, 3).forEach((tier, number) => {
    const held = (tier.num_used_blocks ?? 0) + (tier.num_cached_blocks ?? 0);
    const share = tier.num_blocks ? Math.min(held / tier.num_blocks, 1) : 0;
    const at = 43 + number * 10;
    group.append(svg("text", { x: 12, y: at + 6, class: "tier" }, tier.name));
    group.append(svg("rect", { x: 44, y: at, width: WIDTH - 56, height: 6, rx: 3, class: "track" }));
    const filled = svg("rect", { x: 44, y: at, width: (WIDTH - 56) * share, height: 6, rx: 3, class: "filled" });
    filled.append(svg("title", {}, `${tier.name}: ${held} of ${tier.num_blocks} blocks`));
    group.append(filled);
  });
  return group;
}

// The line between two nodes, and how much goes over it just now.
function link(route, places) {
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
  if (!route.rate) return { line: [line], label: [] };
  // Nearer to where it comes from: lines that cross have their middles in one place.
  const along = 0.3, rest = 1 - along;
  const at = (a, b, c, d) => rest ** 3 * a + 3 * rest ** 2 * along * b + 3 * rest * along ** 2 * c + along ** 3 * d;
  const label = svg("text", { x: at(x1, x1 + bend, x2 - back, x2), y: at(y1, y1, y2, y2) - 5, class: "rate", "text-anchor": "middle" }, `${bytes(route.rate)}/s`);
  label.append(svg("title", {}, told));
  return { line: [line], label: [label] };
}

// routes: [{source, target, rate}], rate in bytes a second.
export function drawMap(nodes, routes) {
  const picture = byId("map").querySelector("svg");
  const columns = ROLES.map((role) => nodes.filter((node) => node.role === role)).filter((column) => column.length);
  const heights = columns.map((column) => column.reduce((sum, node) => sum + heightOf(node) + GAP, 0));
  const width = Math.max(columns.length, 1) * (WIDTH + BETWEEN) - BETWEEN + 2 + 2 * INSET;
  const height = TOP + Math.max(HEIGHT + GAP, ...heights);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("width", width);
  picture.setAttribute("height", height);
  const places = new Map();
  const parts = [];
  columns.forEach((column, position) => {
    const x = 1 + INSET + position * (WIDTH + BETWEEN);
    let y = TOP + (height - TOP - heights[position]) / 2;
    parts.push(svg("text", { x, y: 15, class: "soft" }, `${column[0].role} (${column.length})`));
    for (const node of column) {
      const framed = node.replicas?.length;
      if (framed) parts.push(frame(node, x, y));
      holders(node).forEach((one, line) => {
        const at = framed ? y + FRAME + line * (HEIGHT + INSET) : y;
        places.set(one.node_id, { x, y: at });
        parts.push(box(one, x, at));
      });
      y += heightOf(node) + GAP;
    }
  });
  const links = routes.filter((route) => places.has(route.source) && places.has(route.target)).map((route) => link(route, places));
  picture.replaceChildren(...links.flatMap((one) => one.line), ...parts, ...links.flatMap((one) => one.label));
  const alive = nodes.filter((node) => node.state === "ready").length;
  picture.setAttribute("aria-label", `${nodes.length} nodes, ${alive} of them ready; the table below says the same`);
  if (!nodes.length) picture.replaceChildren(svg("text", { x: 0, y: 15, class: "soft" }, "no node has registered"));
}

export function tiers(node) {
  const all = element("span");
  for (const tier of node.tiers ?? []) {
    const held = (tier.num_used_blocks ?? 0) + (tier.num_cached_blocks ?? 0);
    const meter = element("meter");
    meter.max = tier.num_blocks || 1;
    meter.value = held;
    meter.setAttribute("aria-label", `${tier.name}: ${held} of ${tier.num_blocks} blocks`);
    all.append(`${tier.name} `, meter, ` ${held} of ${tier.num_blocks}  `);
  }
  return all;
}
