// Cache hits by tier and tenant, and the estimated hit ratio of other cache sizes.
import { bars, byId, bytes, cell, element, fill, format, percent, row, say } from "./elements.js";

const SOURCES = { computed: "computed", pool: "its own pool", host: "host memory", ssd: "disk", fetched: "another node" };
// Outcomes of prefix lookups; docs/troubleshooting.md explains each.
const OUTCOMES = {
  hit: "hit", off: "cache not asked", short: "no whole block", unused: "cached, not used", pending: "just computed", dropped: "evicted",
  layout: "other layout", salted: "other salt", headed: "other head", new: "never seen",
};
// Of a hit: why it did not reach further.
const MISSED = {
  unused: "rest cached, not used", pending: "rest just computed", dropped: "rest evicted", layout: "rest in other layout",
  salted: "rest of other salt", new: "rest never seen",
};
const LOCAL = ["pool", "host", "ssd"];

function title(outcome, missed) {
  const name = OUTCOMES[outcome] ?? outcome;
  return missed ? `${name}, ${MISSED[missed] ?? missed}` : name;
}

// Hits that ended early are bars of their own.
function outcomeBars({ outcomes = {}, missed = {} }) {
  const early = Object.entries(missed), hits = (outcomes.hit ?? 0) - early.reduce((all, [, count]) => all + count, 0);
  const whole = Object.entries({ ...outcomes, hit: hits }).map(([name, count]) => [title(name), count]);
  return [...whole, ...early.map(([name, count]) => [title("hit", name), count])].filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
}

export function outcomeOf(request) {
  const places = Object.entries(request.cached_from ?? {}).map(([name, count]) => `${format.format(count)} from ${SOURCES[name] ?? name}`);
  return [title(request.prefix_outcome, request.prefix_missed), ...places].join(", ");
}

export function parts(tokens) {
  const local = LOCAL.reduce((all, name) => all + (tokens[name] ?? 0), 0), remote = tokens.fetched ?? 0;
  return { local, remote, all: local + remote + (tokens.computed ?? 0) };
}

function tenantRow(name, counts) {
  const { local, remote, all } = parts(counts), share = (part) => cell(percent(part / all), "number");
  return row(name, counts.prompt ?? 0, share(local + remote), ...LOCAL.map((tier) => share(counts[tier] ?? 0)), share(remote));
}

// Interpolate between two sampled sizes, logarithmically.
function ratioAt(ratios, capacity) {
  const after = ratios.findIndex(([size]) => size >= capacity);
  if (after < 0) return ratios.at(-1)[1];
  if (after === 0) return ratios[0][1] * capacity / ratios[0][0];
  const [[low, from], [high, to]] = [ratios[after - 1], ratios[after]];
  return from + (to - from) * Math.log(capacity / low) / Math.log(high / low);
}

// Block capacity of the prefill nodes: the pool, then with each slower tier added.
function rooms(nodes) {
  let all = 0;
  return [["the prefill nodes' pools", "pool"], ["these and their host memory", "host"], ["these and their disks", "ssd"]].flatMap(([title, name]) => {
    const of = (node) => (node.tiers ?? []).find((tier) => tier.name === name)?.num_blocks ?? 0;
    const more = nodes.filter((node) => node.role === "prefill").reduce((sum, node) => sum + of(node), 0);
    all += more;
    return more ? [[title, all]] : [];
  });
}

function drawReuse(now) {
  const ratios = now.reuse.hit_ratios, nbytes = now.cluster.block_nbytes;
  const size = (blocks) => `${format.format(blocks)} blocks${nbytes ? `, ${bytes(blocks * nbytes)}` : ""}`;
  const most = ratios.length ? ratios.at(-1)[1] : 0;
  const end = ratios.findIndex(([, ratio]) => ratio >= most - 1e-3), begin = ratios.findIndex(([, ratio]) => ratio > 0);
  const shown = begin < 0 ? [] : ratios.slice(Math.max(begin - 1, 0), end + 1);
  bars(byId("reuse"), shown.map(([blocks, ratio]) => [size(blocks), ratio]), percent, 1);
  const told = rooms(shown.length ? now.cluster.nodes : []).map(([title, blocks]) => ` As large as ${title} (${size(blocks)}): ${percent(ratioAt(ratios, blocks))}.`);
  const uses = `Of ${format.format(now.reuse.num_uses)} uses of blocks, the hit rate of one LRU cache for all.`;
  say(byId("reuse").nextElementSibling, shown.length ? uses + told.join("") : "");
}

// Prompt tokens by source, requests by outcome, and a row for each tenant.
export function drawTokens(tokens, prefixes, tenants) {
  const { local, remote, all } = parts(tokens);
  const shown = Object.entries(SOURCES).map(([name, title]) => [title, tokens[name] ?? 0]);
  bars(byId("sources"), all ? shown : [], (count) => `${format.format(count)} (${percent(count / all)})`);
  say(byId("sources").nextElementSibling, all ? `From the cache ${percent((local + remote) / all)}: on the node itself ${percent(local / all)}, from another ${percent(remote / all)}.` : "");
  bars(byId("outcomes"), outcomeBars(prefixes));
  fill(byId("tenants"), Object.entries(tenants).map(([name, own]) => tenantRow(name, own)));
}

export function drawCache(now) {
  drawTokens(now.tokens, now.cluster.prefixes ?? {}, now.tenants);
  fill(byId("prefixes"), now.prefixes.map((prefix) => row(element("th", prefix.key.slice(0, 12), "id"), prefix.blocks,
    cell((60 * prefix.uses_per_s).toFixed(1), "number"), prefix.holders.length, cell(prefix.holders.join(", ") || "none now", "wrap"))));
  drawReuse(now);
}
