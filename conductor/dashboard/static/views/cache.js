// The cache by source, outcome, tier, tenant and prefix, and what other sizes of it would hit.
import { LOCAL, OUTCOMES, SOURCES, outcomePairs, parts } from "../cache_words.js";
import { Plots } from "../charts/plot.js";
import { bars, byId, bytes, cell, element, fill, format, percent, row, say, within } from "../elements.js";
import { prefixesOf } from "../frames.js";
import * as history from "../history.js";
import { tierRows } from "../panels/tiers.js";

const SOURCE_COLOURS = { computed: "--soft", pool: "--good", host: "--c-teal", ssd: "--c-violet", fetched: "--accent" };
const REASON_COLOURS = {
  off: "--line-strong", short: "--c-brown", unused: "--c-yellow", pending: "--c-orange", dropped: "--bad",
  layout: "--c-violet", salted: "--c-pink", headed: "--accent", new: "--soft",
};
const CHARTS = [
  ["chart-sources", [...LOCAL, "fetched", "computed"].map((name) => `source-${name}`),
    [...LOCAL, "fetched", "computed"].map((name) => [SOURCES[name], SOURCE_COLOURS[name]]), { stacked: true }],
  ["chart-outcomes", ["outcome-hit", "outcome-early", ...Object.keys(REASON_COLOURS).map((name) => `outcome-${name}`)],
    [["hit", "--good"], ["hit, rest missed", "--c-teal"], ...Object.entries(REASON_COLOURS).map(([name, colour]) => [OUTCOMES[name], colour])],
    { stacked: true }],
];

function tenantRow(name, counts) {
  const { local, remote, all } = parts(counts), share = (part) => cell(percent(part / all), "number");
  return row(within("th", "cut", name), counts.prompt ?? 0, share(local + remote), ...LOCAL.map((tier) => share(counts[tier] ?? 0)), share(remote));
}

// A prefix below the one that it goes on from.
function prefixName(prefix) {
  const made = element("th", `${prefix.depth ? "└ " : ""}${prefix.key.slice(0, 12)}`, "id");
  made.style.paddingLeft = `${0.6 + Math.min(prefix.depth, 8)}rem`;
  return made;
}

function shortened(text) {
  const made = cell(text, "cut");
  made.title = text;
  return made;
}

// Copies by tier, and where they are.
function holders({ copies, holders: names, tiers }) {
  const more = copies > names.length ? ` and ${copies - names.length} more` : "";
  const told = Object.entries(tiers).map(([tier, count]) => `${count} ${tier}`).join(", ");
  return shortened(copies ? `${told || copies}: ${names.join(", ")}${more}` : "none now");
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
    const more = nodes.filter((node) => ["prefill", "both"].includes(node.role)).reduce((sum, node) => sum + of(node), 0);
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
function drawTokens(tokens, prefixes, tenants) {
  const { local, remote, all } = parts(tokens);
  const shown = Object.entries(SOURCES).map(([name, title]) => [title, tokens[name] ?? 0]);
  bars(byId("sources"), all ? shown : [], (count) => `${format.format(count)} (${percent(count / all)})`);
  say(byId("sources").nextElementSibling, all ? `From the cache ${percent((local + remote) / all)}: on the node itself ${percent(local / all)}, from another ${percent(remote / all)}.` : "");
  bars(byId("outcomes"), outcomePairs(prefixes));
  fill(byId("tenants"), Object.entries(tenants).map(([name, own]) => tenantRow(name, own)));
}

export function mount(root, page) {
  const plots = new Plots(root, CHARTS, history);

  function draw(frame) {
    const { now } = frame;
    plots.draw(page.range(), now.unix_s);
    drawTokens(now.tokens, prefixesOf(now), frame.isWhole ? now.tenants : { [now.tenant]: now.tokens });
    if (!frame.isWhole) return;
    fill(byId("prefixes"), now.prefixes.map((prefix) => row(prefixName(prefix), prefix.blocks,
      cell((60 * prefix.uses_per_s).toFixed(1), "number"), prefix.hits, prefix.misses, shortened(prefix.tenant), holders(prefix))));
    fill(byId("tiers"), tierRows(now.cluster.nodes));
    drawReuse(now);
  }

  return { draw, recolour: () => plots.recolour(), unmount: () => plots.remove() };
}
