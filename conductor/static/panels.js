// Everything the dashboard says of a cluster, from one snapshot of /v1/live and the one before it.
import * as charts from "./charts.js";
import { bars, byId, bytes, cell, element, fill, format, patch, percent, pill, row, say, seconds, within } from "./draw.js";
import { drawMap, holders, stateClass, stateOf, tiers } from "./map.js";

const LOST_SHOWN_S = 120; // a node whose lease ended stays in sight for so long

const roles = new Map(); // of every node seen, for those that are gone
const nodeOf = new Map(); // the node of every replica seen
let before = null; // the snapshot of the second before, for rates

function rate(now, name) {
  const span = before ? now.unix_s - before.unix_s : 0;
  return span > 0 ? Math.max(0, now.metrics[name] - before.metrics[name]) / span : 0;
}

function withRates(now) {
  const span = before ? now.unix_s - before.unix_s : 0;
  const known = new Map((before?.routes ?? []).map((route) => [`${route.source}\n${route.target}`, route.nbytes]));
  return now.routes.map((route) => {
    const past = known.get(`${route.source}\n${route.target}`) ?? (before ? 0 : route.nbytes);
    return { ...route, rate: span > 0 ? (route.nbytes - past) / span : 0 };
  });
}

// The nodes there are, and those that went without saying so a moment ago.
function withLost(now) {
  const all = now.cluster.nodes.flatMap((node) => [node, ...(node.replicas ?? [])]);
  const present = new Set(all.map((node) => node.node_id));
  const lost = new Map();
  for (const event of now.events) {
    const role = roles.get(event.node);
    // A replica that is away is told by its node's state, as long as there is another.
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

function drawNow(now) {
  const { metrics } = now;
  const hits = metrics.prefix_hit_tokens / metrics.prefix_queried_tokens;
  const figures = [
    ["running", format.format(metrics.running_requests), "requests running"],
    ["waiting", format.format(metrics.waiting_requests), "waiting for a first token"],
    ["tokens", format.format(Math.round(rate(now, "output_tokens"))), "tokens a second"],
    ["hits", percent(hits), "of prompt tokens from the cache"],
    ["blocks", format.format(now.cluster.index.num_blocks), "blocks in the index"],
    ["index", now.cluster.index.connected ? seconds(now.cluster.index.lag_s) : "lost", now.cluster.index.connected ? "behind the index" : "Redis does not answer"],
  ];
  patch(byId("now"), figures.map(([id, value, name]) => {
    const card = within("div", "", element("b", value), element("span", name));
    card.dataset.figure = id;
    return card;
  }));
}

function drawCharts(now, routes) {
  const prompt = rate(now, "prefix_queried_tokens"), hit = rate(now, "prefix_hit_tokens");
  charts.add(now.unix_s, {
    "chart-tokens": [rate(now, "output_tokens"), prompt],
    "chart-requests": [now.metrics.running_requests, now.metrics.waiting_requests],
    "chart-hits": [prompt ? (100 * hit) / prompt : null],
    "chart-moved": [routes.reduce((sum, route) => sum + route.rate, 0) / 1e6],
  });
}

// Where a node is, and how its host and GPUs are.
function hostOf(node) {
  const { cpu_ratio: cpu, memory_available_nbytes: free, gpus = [] } = node.health ?? {};
  const words = [node.host, node.pid];
  if (free) words.push(`${bytes(free)} free`, `CPU ${percent(cpu)}`);
  for (const gpu of gpus) words.push(`GPU ${gpu.gpu}: ${percent(gpu.utilization)}, ${gpu.temperature_celsius} °C, ${Math.round(gpu.power_watts)} W`);
  return words.join(", ");
}

function drawNodes(nodes) {
  const lines = nodes.flatMap((node) => [[node, "whole"], ...(node.replicas ?? []).map((one) => [one, "replica"])]);
  fill(byId("nodes"), lines.map(([node, kind]) => {
    const load = node.load ?? {};
    const state = pill(stateOf(node), stateClass(node));
    if (node.reasons?.length) state.append(element("small", node.reasons.join("; "), "reasons"));
    return row(cell(node.node_id, kind), node.role, state, load.num_running ?? 0, load.num_waiting ?? 0,
      load.num_queued_tokens ?? 0, tiers(node), node.num_index_blocks ?? 0, node.num_placed ?? 0,
      cell(hostOf(node), "soft"));
  }));
}

function drawCache(now) {
  const names = { computed: "computed", pool: "its own pool", host: "host memory", ssd: "disk", fetched: "another node" };
  const all = Object.values(now.tokens).reduce((sum, count) => sum + count, 0);
  const shown = Object.entries(names).map(([name, title]) => [title, now.tokens[name] ?? 0]);
  bars(byId("sources"), all ? shown : [], (count) => `${format.format(count)} (${percent(count / all)})`);
  fill(byId("tenants"), Object.entries(now.tenants).map(([name, counts]) =>
    row(name, counts.prompt ?? 0, cell(percent((counts.cached ?? 0) / counts.prompt), "number"))));
  fill(byId("prefixes"), now.prefixes.map((prefix) =>
    row(cell(prefix.key.slice(0, 12), "id"), prefix.blocks, cell((60 * prefix.uses_per_s).toFixed(1), "number"),
      prefix.holders.join(", ") || "nobody now")));
}

function drawRoutes(routes) {
  const sorted = [...routes].sort((a, b) => b.rate - a.rate || b.nbytes - a.nbytes);
  fill(byId("routes"), sorted.map((route) => {
    const mean = route.transfers ? route.seconds / route.transfers : 0;
    return row(route.source, route.target, route.transport || "–", cell(`${bytes(route.rate)}/s`, "number"),
      cell(route.seconds ? `${bytes(route.nbytes / route.seconds)}/s` : "–", "number"),
      cell(bytes(route.nbytes), "number"), route.transfers, cell(seconds(mean), "number"), route.failures);
  }));
}

function drawRequests(requests, open) {
  fill(byId("requests").querySelector("table"), requests.map((request) => {
    const className = { done: "good", running: "warn", cancelled: "soft" }[request.status] ?? "bad";
    return row(element("th", request.id, "id"), pill(request.status, className), request.prompt_tokens, request.cached_tokens,
      request.output_tokens, cell(seconds(request.ttft_s), "number"), cell(seconds(request.tpot_s), "number"),
      cell(seconds(request.e2e_s), "number"), open(request.id));
  }));
}

// A histogram's buckets that hold something, and the share that keeps the limit.
function drawLatency(id, histogram, limit_s) {
  const buckets = histogram.buckets.map(([le, count], at, all) => [le === "+Inf" ? Infinity : Number(le), count - (at ? all[at - 1][1] : 0)]);
  const used = buckets.filter(([, count]) => count);
  const shown = used.length ? buckets.slice(buckets.indexOf(used[0]), buckets.indexOf(used.at(-1)) + 1) : [];
  bars(byId(id), shown.map(([le, count]) => [le === Infinity ? "more" : `≤ ${seconds(le)}`, count]));
  const all = buckets.reduce((sum, [, count]) => sum + count, 0);
  const within = buckets.filter(([le]) => le <= limit_s).reduce((sum, [, count]) => sum + count, 0);
  const mean = all ? `mean ${seconds(histogram.sum / all)} of ${format.format(all)}` : "";
  const kept = limit_s ? `; at least ${percent(within / all)} within ${seconds(limit_s)}` : "";
  say(byId(id).nextElementSibling, all ? mean + kept : "");
}

function drawCost(errors) {
  const shown = (value) => cell(value === null ? "–" : `${value.toFixed(1)} %`, "number");
  fill(byId("cost").querySelector("table"), Object.entries(errors).map(([name, error]) =>
    row(name, error.count, shown(error.p50_percent), shown(error.p90_percent))));
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

// ``open(id)`` makes what leads to a request's timeline.
export function draw(now, open) {
  const routes = withRates(now);
  const state = !now.ready ? "not ready" : now.degraded.length ? "degraded" : "ready";
  say(byId("model"), now.cluster.model);
  say(byId("state"), state);
  byId("state").className = `pill ${{ ready: "good", degraded: "warn" }[state] ?? "bad"}`;
  patch(byId("degraded"), now.degraded.map((text) => element("li", text)));
  drawNow(now);
  drawCharts(now, routes);
  const nodes = withLost(now);
  drawMap(nodes, routes);
  drawNodes(nodes);
  drawCache(now);
  drawRoutes(routes);
  drawRequests(now.requests, open);
  drawLatency("ttft", now.metrics.time_to_first_token_seconds, now.slo.ttft_s);
  drawLatency("gap", now.metrics.inter_token_latency_seconds, now.slo.tbt_s);
  bars(byId("rejections"), Object.entries(now.rejections));
  bars(byId("placements"), Object.entries(now.placements));
  drawCost(now.cluster.prediction_errors);
  drawEvents(now.events);
  before = now;
}
