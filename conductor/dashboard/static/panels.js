// The dashboard's panels, from one snapshot of /v1/live and the one before it.
import { drawCache, drawTokens, outcomeOf, parts } from "./cache_panel.js";
import * as charts from "./charts.js";
import { byId, bytes, cell, element, fill, format, patch, percent, pill, row, say, seconds, within } from "./elements.js";
import { byName, drawMap, holders, stateClass, stateOf, tiers } from "./cluster_map.js";
import { pathsWithRates, rate, rateOfAll, remember, withRates } from "./rates.js";
import { drawEstimates, drawService } from "./latency.js";
import { drawPlan } from "./planner.js";
import { drawTransfers } from "./transfers.js";

const LOST_SHOWN_S = 120; // how long a node stays listed after its lease has ended

const roles = new Map(); // roles of all nodes seen, also of lost ones
const nodeOf = new Map(); // node of every replica seen

// Current nodes, and nodes lost a moment ago.
function withLost(now) {
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
  if (roles.size > 4096) {
    roles.clear();
    nodeOf.clear();
  }
  for (const node of now.cluster.nodes) {
    for (const one of holders(node)) {
      roles.set(one.node_id, one.role);
      nodeOf.set(one.node_id, node.node_id);
    }
  }
  return [...now.cluster.nodes, ...lost.values()];
}

// Of the last second; of all time where nothing was generated in it. A prefill counts as a step.
function tokensPerStep(now) {
  const tokens = rate(now, "output_tokens"), accepted = rate(now, "accepted_tokens");
  const { output_tokens: all, accepted_tokens: ofAll } = now.metrics;
  return tokens > accepted ? tokens / (tokens - accepted) : all / (all - ofAll);
}

function drawNow(now) {
  const { metrics } = now;
  const hits = metrics.prefix_hit_tokens / metrics.prefix_queried_tokens;
  const figures = [
    ["running", format.format(metrics.running_requests), "requests running"],
    ["waiting", format.format(metrics.waiting_requests), "waiting for a first token"],
    ["tokens", format.format(Math.round(rate(now, "output_tokens"))), "tokens a second"],
    ...(metrics.accepted_tokens ? [["step", format.format(tokensPerStep(now)), "tokens a step of a request"]] : []),
    ["hits", percent(hits), "of prompt tokens from the cache"],
    ["blocks", format.format(now.cluster.index.num_blocks), "blocks in the index"],
    ["index", now.cluster.index.connected ? `${Math.round(1000 * now.cluster.index.lag_s)} ms` : "lost", now.cluster.index.connected ? "behind the index" : "Redis does not answer"],
  ];
  patch(byId("now"), figures.map(([id, value, name]) => {
    const card = within("div", "", element("b", value), element("span", name));
    card.dataset.figure = id;
    return card;
  }));
}

function drawCharts(now, routes) {
  const found = rateOfParts(now);
  charts.add(now.unix_s, {
    "chart-tokens": [rate(now, "output_tokens"), rate(now, "prefix_queried_tokens")],
    "chart-requests": [now.metrics.running_requests, now.metrics.waiting_requests],
    "chart-goodput": [rateOfAll(now, (one) => one.metrics.requests ?? {}), rate(now, "requests_within_slo"), rateOfAll(now, (one) => one.rejections)],
    "chart-hits": found,
    "chart-moved": [routes.reduce((sum, route) => sum + route.rate, 0) / 1e6],
  });
}

// Percent of the last second's prompt tokens found on the node itself and on another; null without prompts.
function rateOfParts(now) {
  const [local, remote, all] = ["local", "remote", "all"].map((part) => rateOfAll(now, (one) => [parts(one.tokens)[part]]));
  return all ? [(100 * local) / all, (100 * remote) / all] : [null, null];
}

// A node's host, process, and the health of host and GPUs.
function hostOf(node) {
  const { cpu_ratio: cpu, memory_available_nbytes: free, gpus = [] } = node.health ?? {};
  const words = [];
  if (free) words.push(`${bytes(free)} free`, `CPU ${percent(cpu)}`);
  for (const { gpu, utilization, temperature_celsius: heat, power_watts: power, throttles } of gpus) {
    const told = [[utilization, percent(utilization)], [heat, `${heat} °C`], [power, `${Math.round(power)} W`], ...throttles.map((why) => [why, why])];
    words.push(`GPU ${gpu}: ${told.filter(([value]) => value != null).map(([, text]) => text).join(" ") || "lost"}`);
  }
  const where = cell(`${node.host}, ${node.pid}`, "soft");
  if (words.length) where.append(element("small", words.join(", "), "below"));
  return where;
}

function drawNodes(nodes) {
  const lines = [...nodes].sort(byName).flatMap((node) => [[node, "whole"], ...(node.replicas ?? []).map((one) => [one, "replica"])]);
  fill(byId("nodes"), lines.map(([node, kind]) => {
    const load = node.load ?? {};
    const state = pill(stateOf(node), stateClass(node));
    if (node.reasons?.length) state.append(element("small", node.reasons.join("; "), "reasons"));
    return row(cell(node.node_id, kind), node.role, state, load.num_running ?? 0, load.num_waiting ?? 0,
      load.num_queued_tokens ?? 0, tiers(node), node.num_index_blocks ?? 0, node.num_placed ?? 0,
      hostOf(node));
  }));
}

function drawRequests(requests, open) {
  fill(byId("requests").querySelector("table"), requests.map((request) => {
    const className = { done: "good", running: "warn", cancelled: "soft" }[request.status] ?? "bad";
    return row(element("th", request.id, "id"), pill(request.status, className), request.prompt_tokens, request.cached_tokens,
      outcomeOf(request), request.output_tokens, cell(seconds(request.ttft_s), "number"), cell(seconds(request.tpot_s), "number"),
      cell(seconds(request.e2e_s), "number"), open(request.id));
  }));
}

function drawEvents(events) {
  const list = byId("events").querySelector("ol");
  byId("events").querySelector(".none").hidden = events.length > 0;
  patch(list, [...events].reverse().slice(0, 40).map((event) => {
    const item = element("li", undefined, { left: "bad", unhealthy: "bad", joined: "good", healthy: "good", retry: "warn" }[event.kind]);
    item.append(element("time", new Date(event.unix_s * 1000).toLocaleTimeString()), element("b", `${event.kind} ${event.node}`),
      element("span", event.text));
    return item;
  }));
}

function drawState(now, model, degraded) {
  const state = !now.ready ? "not ready" : degraded.length ? "degraded" : "ready";
  say(byId("model"), model);
  say(byId("state"), state);
  byId("state").className = `pill ${{ ready: "good", degraded: "warn" }[state] ?? "bad"}`;
  patch(byId("degraded"), degraded.map((text) => element("li", text)));
}

// What one tenant may see: its own tokens and requests.
function drawTenant(now, open) {
  document.body.dataset.tenant = now.tenant;
  drawState(now, now.model, []);
  drawTokens(now.tokens, now, { [now.tenant]: now.tokens });
  drawRequests(now.requests, open);
}

// ``open(id)`` creates the link to a request's timeline.
export function draw(now, open) {
  if (now.tenant !== undefined) {
    drawTenant(now, open);
    return;
  }
  const routes = withRates(now);
  drawState(now, now.cluster.model, now.degraded);
  drawNow(now);
  drawCharts(now, routes);
  const nodes = withLost(now);
  drawMap(nodes, routes);
  drawNodes(nodes);
  drawPlan(now.planner);
  drawCache(now);
  drawTransfers(pathsWithRates(now), routes);
  drawRequests(now.requests, open);
  drawService(now);
  drawEstimates(now);
  drawEvents(now.events);
  remember(now);
}
