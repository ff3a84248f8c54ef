// Figures over time, one of each a second: what the page has seen since it was opened, at most an hour.
import { OUTCOMES, SOURCES, parts, wholeHits } from "./cache_words.js";
import { prefixesOf } from "./frames.js";

export const KEPT = 3600; // seconds
export const QUANTILES = [0.5, 0.9, 0.95, 0.99];
export const QUANTILES_OVER_S = 10; // a second has too few requests for quantiles
export const HISTOGRAMS = {
  ttft: "time_to_first_token_seconds", gap: "inter_token_latency_seconds",
  tpot: "time_per_output_token_seconds", e2e: "request_seconds",
};

const times = [];
const columns = new Map();
let counted = []; // buckets of the histograms in the last seconds, oldest first

// Interpolated inside its bucket; beyond the last bound, that bound.
function quantile(buckets, share) {
  const wanted = share * buckets.at(-1)[1];
  const at = buckets.findIndex(([, count]) => count >= wanted);
  const [low, below] = at ? buckets[at - 1] : [0, 0], [high, until] = buckets[at];
  return Number.isFinite(high) ? low + (high - low) * (wanted - below) / (until - below) : low;
}

function quantilesOf(name, now) {
  const past = counted[0]?.histograms[name];
  const buckets = now[name].map(([le, count], at) => [le === "+Inf" ? Infinity : Number(le), count - (past?.[at][1] ?? 0)]);
  const some = past && buckets.at(-1)[1] > 0;
  return QUANTILES.map((share) => (some ? quantile(buckets, share) : null));
}

function latencies({ now, before }) {
  if (!before) counted = []; // of another conductor
  const histograms = Object.fromEntries(Object.values(HISTOGRAMS).map((name) => [name, now.metrics[name].buckets]));
  counted = counted.filter((one) => now.unix_s - one.unix_s <= QUANTILES_OVER_S && one.unix_s <= now.unix_s);
  const found = Object.entries(HISTOGRAMS).flatMap(([id, name]) =>
    quantilesOf(name, histograms).map((value, at) => [`${id}-${QUANTILES[at]}`, value]));
  counted.push({ unix_s: now.unix_s, histograms });
  return found;
}

// Percent of the last second's prompt tokens found on the node itself and on another; null without prompts.
function hits(frame) {
  const [local, remote, all] = ["local", "remote", "all"].map((part) => frame.rateOf((one) => [parts(one.tokens)[part]]));
  return all ? [["own", (100 * local) / all], ["another", (100 * remote) / all]] : [["own", null], ["another", null]];
}

function ofCluster(frame) {
  const { metrics } = frame.now;
  return [
    ["generated", frame.rate("output_tokens")], ["prompt", frame.rate("prefix_queried_tokens")],
    ["running", metrics.running_requests], ["waiting", metrics.waiting_requests],
    ["ended", frame.rateOf((one) => one.metrics.requests ?? {})], ["good", frame.rate("requests_within_slo")],
    ["refused", frame.rateOf((one) => one.rejections)],
    ["moved", frame.routes.reduce((sum, route) => sum + route.rate, 0) / 1e6],
    ...latencies(frame),
  ];
}

function ofPrompts(frame) {
  return [
    ...hits(frame),
    ...Object.keys(SOURCES).map((name) => [`source-${name}`, frame.rateOf((one) => [one.tokens[name] ?? 0])]),
    ...Object.keys(OUTCOMES).map((name) => [`outcome-${name}`, frame.rateOf((one) => [prefixesOf(one).outcomes[name] ?? 0])]),
    ["outcome-hit", frame.rateOf((one) => [wholeHits(prefixesOf(one))])],
    ["outcome-early", frame.rateOf((one) => Object.values(prefixesOf(one).missed ?? {}))],
  ];
}

export function record(frame) {
  const values = [...ofPrompts(frame), ...(frame.isWhole ? ofCluster(frame) : [])];
  times.push(frame.now.unix_s);
  const full = times.length > KEPT;
  if (full) times.shift();
  for (const [name, value] of new Map(values)) {
    if (!columns.has(name)) columns.set(name, new Array(times.length - 1).fill(null));
    const column = columns.get(name);
    column.push(value);
    if (full) column.shift();
  }
}

// Times from ``until - range_s`` to ``until``, then the column of each name.
export function over(range_s, until, names) {
  const first = times.findIndex((one) => one >= until - range_s), after = times.findIndex((one) => one > until);
  const cut = (column) => (first < 0 ? [] : column.slice(first, after < 0 ? undefined : after));
  return [cut(times), ...names.map((name) => cut(columns.get(name) ?? []))];
}

// Number of seconds kept; for tests.
export const kept = () => times.length;
