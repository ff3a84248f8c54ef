// The nodes with their load and state, one of them in detail, and the plan.
import { bytes, cell, element, fill, format, patch, percent, pill, row, say, scrolling, seconds, table, within } from "../elements.js";
import { heldBy, regionOf, stateClass, stateOf } from "../nodes.js";
import { canariesOf, drawModels, drawMoves, drawPlan } from "../panels/plan.js";
import { TIER_COLUMNS, tierRows } from "../panels/tiers.js";
import { Listing } from "./listing.js";

const load = (node, name) => node.load?.[name] ?? 0;
const filled = (node) => {
  const pool = node.tiers?.find((tier) => tier.name === "pool");
  return pool?.num_blocks ? heldBy(pool) / pool.num_blocks : 0;
};

// Readings of a node's GPUs.
function gpus(node) {
  return (node.health?.gpus ?? []).map(({ gpu, utilization, temperature_celsius: heat, power_watts: power, memory_free_nbytes: free, memory_taken_nbytes: taken, throttles }) => {
    const told = [[utilization, percent(utilization)], [heat, `${heat} °C`], [power, `${Math.round(power)} W`], [free, `${bytes(free)} free`],
      [taken || null, `${bytes(taken)} less than its pool believes`], ...throttles.map((why) => [why, why])];
    return [`GPU ${gpu}`, told.filter(([value]) => value != null).map(([, text]) => text).join(" ") || "lost"];
  });
}

function stateCell(node) {
  const made = pill(stateOf(node), stateClass(node));
  if (node.reasons?.length) made.append(" ", element("small", node.reasons.join("; "), "bad"));
  return made;
}

// Nodes without a region have no such column.
const REGION = { title: "region", width: 100, cell: regionOf, by: regionOf };

function columnsOf(page) {
  const name = (node) => {
    const made = element(page.live ? "a" : "span", node.node_id);
    if (page.live) made.href = page.with({ node: node.node_id });
    return within("th", node.replica ? "replica" : "whole", made);
  };
  return [
    { title: "node", width: 170, cell: name, by: (node) => node.node_id },
    { title: "role", width: 80, cell: (node) => node.role, by: (node) => node.role },
    { title: "state", width: 160, cell: stateCell, by: stateOf },
    { title: "running", width: 78, cell: (node) => load(node, "num_running"), by: (node) => load(node, "num_running") },
    { title: "waiting", width: 78, cell: (node) => load(node, "num_waiting"), by: (node) => load(node, "num_waiting") },
    { title: "queued tokens", width: 116, cell: (node) => load(node, "num_queued_tokens"), by: (node) => load(node, "num_queued_tokens") },
    { title: "pool filled", width: 100, cell: (node) => cell(percent(filled(node)), "number"), by: filled },
    { title: "in the index", width: 104, cell: (node) => node.num_index_blocks ?? 0, by: (node) => node.num_index_blocks ?? 0 },
    { title: "placed", width: 76, cell: (node) => node.num_placed ?? 0, by: (node) => node.num_placed ?? 0 },
    { title: "host, process", width: 190, cell: (node) => cell(`${node.host}, ${node.pid}`, "soft"), by: (node) => `${node.host}` },
  ];
}

function routesOf(node, frame) {
  const own = frame.routes.filter((route) => route.source === node.node_id || route.target === node.node_id).sort((a, b) => b.nbytes - a.nbytes).slice(0, 20);
  if (!own.length) return element("p", "No transfers yet.", "none");
  return scrolling("Transfers", table(["from", "to", "now", "moved", "failed"], own.map((route) =>
    row(route.source, route.target, cell(`${bytes(route.rate)}/s`, "number"), cell(bytes(route.nbytes), "number"), route.failures))));
}

function nodeView(node, frame) {
  const { memory_available_nbytes: free, cpu_ratio: cpu } = node.health ?? {};
  const pairs = [
    ["state", stateOf(node)], ...(node.reasons?.length ? [["why", node.reasons.join("; ")]] : []),
    ...(node.warnings?.length ? [["warnings", node.warnings.join("; ")]] : []),
    ...(regionOf(node) ? [["region", regionOf(node)]] : []), ["role", node.role], ["host, process", `${node.host}, ${node.pid}`], ["ranks", node.ranks || "one process"],
    ["load", `${load(node, "num_running")} running, ${load(node, "num_waiting")} waiting, ${format.format(load(node, "num_queued_tokens"))} tokens queued`],
    ...(free ? [["host's memory, CPU", `${bytes(free)} free, ${percent(cpu)}`]] : []), ...gpus(node),
    ...(node.join_s ? [["joined in", seconds(node.join_s)]] : []), ...(node.num_starts > 1 ? [["starts", node.num_starts]] : []),
    ...(node.version ? [["version", node.version]] : []), ...(node.rpc_address ? [["address", node.rpc_address]] : []),
  ];
  const facts = element("dl");
  for (const [name, value] of pairs) facts.append(element("dt", name), element("dd", String(value)));
  return [facts, element("h4", "Blocks by tier"), node.tiers?.length ? scrolling("Blocks by tier", table(TIER_COLUMNS, tierRows([node]))) : element("p", "None reported.", "none"),
    element("h4", "Transfers"), routesOf(node, frame)];
}

function isShown(page, node, words) {
  if (page.param("role") && node.role !== page.param("role")) return false;
  if (page.param("state") && (page.param("state") === "ready") !== (node.state === "ready")) return false;
  const text = [node.node_id, node.host, stateOf(node), ...(node.reasons ?? [])].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

export function mount(root, page) {
  const listing = new Listing(root, page, {
    name: "node", box: "#nodes", panel: "#node", filters: { role: "#role", state: "#node-state" },
    label: "Table of the nodes", columns: columnsOf(page), key: (node) => node.node_id, none: ["No node here."],
  });
  const { list } = listing;

  function drawDetail(frame, lines) {
    listing.open();
    if (!listing.id) return;
    const node = lines.find((one) => one.node_id === listing.id);
    patch(listing.content, node ? nodeView(node, frame) : [element("p", "No node of this name is in the cluster.", "none")]);
  }

  function draw(frame) {
    const lines = frame.nodes.flatMap((node) => [node, ...(node.replicas ?? [])]);
    if (!list.columns.includes(REGION) && lines.some(regionOf)) list.add(REGION);
    if (page.live) drawDetail(frame, lines);
    listing.draw(lines, (node, words) => isShown(page, node, words));
    drawPlan(frame.now.planner);
    drawMoves(frame.now.cluster.migrations);
    drawModels(frame.now.cluster.models);
    say(root.querySelector("#canaries"), canariesOf(frame.now.cluster));
  }

  return { draw, recolour() {}, unmount: () => list.remove() };
}
