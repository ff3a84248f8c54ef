// The dashboard: reads the conductor's own JSON pages once a second and draws them. Every text goes in as text,
// never as HTML, because node names and request ids come from outside.
"use strict";

const EVERY_MS = 1000;
const METRICS_EVERY = 4; // of those rounds: a page of many series costs the conductor some milliseconds
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

function seconds(value) {
  if (!value) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 2 : 1)} ms` : `${value.toFixed(2)} s`;
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(...cells) {
  const made = element("tr");
  for (const cell of cells) {
    const isNode = cell instanceof Node;
    if (isNode && cell.nodeName === "TD") { made.append(cell); continue; }
    const td = element("td", isNode ? undefined : typeof cell === "number" ? number.format(cell) : cell);
    if (isNode) td.append(cell);
    if (typeof cell === "number") td.className = "number";
    made.append(td);
  }
  return made;
}

function status(text, className) {
  const td = element("td", undefined, "status");
  td.append(element("span", text, className));
  return td;
}

function blocks(tiers) {
  const all = element("span");
  for (const tier of tiers ?? []) {
    const meter = element("meter");
    meter.max = tier.num_blocks || 1;
    meter.value = tier.num_used_blocks || 0;
    const cached = tier.num_cached_blocks === undefined ? "" : `, ${number.format(tier.num_cached_blocks)} cached`;
    const used = `${number.format(tier.num_used_blocks ?? 0)} of ${number.format(tier.num_blocks ?? 0)} used${cached}`;
    meter.title = `${tier.name}: ${used}`;
    all.append(`${tier.name} `, meter, ` ${used} `);
  }
  return all;
}

// One fact of a timeline; of a placement, which is an object, the sentence that says why.
function fact([key, value]) {
  if (value && typeof value === "object") return value.detail ?? "";
  if (typeof value === "number" && key.endsWith("_s")) return `${key.slice(0, -2)} ${seconds(value)}`;
  return value === "" || value === null ? "" : `${key} ${typeof value === "number" ? number.format(value) : value}`;
}

async function json(path) {
  const response = await fetch(path, { cache: "no-store" });
  return response.json();
}

// The one line of a metrics page that begins with this name, as a number.
function metric(page, name) {
  const line = page.split("\n").find((one) => one.startsWith(name));
  return line ? Number(line.slice(line.lastIndexOf(" "))) : 0;
}

let round = 0;
let last = null; // output tokens and when they were read, for the rate

function drawFigures(page, cluster) {
  const queried = metric(page, "moonpool_prefix_queried_tokens_total");
  const hit = metric(page, "moonpool_prefix_hit_tokens_total");
  const output = metric(page, "moonpool_output_tokens_total");
  const now = performance.now();
  const rate = last && now > last.now ? ((output - last.output) * 1000) / (now - last.now) : 0;
  last = { now, output };
  const figures = [
    [number.format(metric(page, "moonpool_running_requests")), "running"],
    [number.format(metric(page, "moonpool_waiting_requests")), "waiting for a first token"],
    [number.format(Math.round(rate)), "tokens a second"],
    [queried ? `${((100 * hit) / queried).toFixed(1)} %` : "–", "of prompt tokens from the cache"],
    [number.format(cluster.index?.num_blocks ?? 0), "blocks in the index"],
    [cluster.index?.connected === false ? "lost" : "connected", "index"],
  ];
  byId("figures").replaceChildren(...figures.map(([value, name]) => {
    const card = element("div");
    card.append(element("b", value), element("span", name));
    return card;
  }));
}

function drawNodes(nodes) {
  byId("nodes").tBodies[0].replaceChildren(...nodes.map((node) => {
    const load = node.load ?? {};
    const name = node.metrics_url ? element("a", node.node_id ?? node.id) : element("span", node.node_id ?? node.id);
    if (node.metrics_url) name.href = node.metrics_url;
    const className = node.state === "ready" ? "good" : node.state === "draining" || node.state === "starting" ? "warn" : "bad";
    return row(name, node.role ?? "", status(node.state ?? "", className), load.num_running ?? 0, load.num_waiting ?? 0,
      load.num_queued_tokens ?? 0, blocks(node.tiers), node.num_index_blocks ?? 0,
      element("td", `${node.host ?? ""}, ${node.pid ?? ""}`, "soft"), element("td", String(node.epoch ?? ""), "soft"));
  }));
}

function drawRequests(requests) {
  byId("nothing").hidden = requests.length > 0;
  byId("requests").tBodies[0].replaceChildren(...requests.map((request) => {
    const open = element("button", "show");
    open.onclick = () => showTimeline(request.id);
    const className = { done: "good", running: "warn", cancelled: "soft" }[request.status] ?? "bad";
    return row(element("td", request.id, "id"), status(request.status, className), request.prompt_tokens,
      request.cached_tokens, request.output_tokens, seconds(request.ttft_s), seconds(request.tpot_s),
      seconds(request.e2e_s), open);
  }));
}

async function showTimeline(id) {
  const path = `/v1/requests/${encodeURIComponent(id)}/timeline`;
  const timeline = await json(path);
  const box = byId("timeline");
  box.querySelector("h2").textContent = id;
  box.querySelector("a").href = path;
  const several = timeline.sequences ?? [timeline];
  box.querySelector("p").textContent = several.map((one) => one.summary?.detail).filter(Boolean).join(" · ");
  const events = several.flatMap((one) => one.events ?? []);
  const end = Math.max(...events.map((event) => event.at_s), 1e-9);
  box.querySelector("ol").replaceChildren(...events.map(({ event, at_s, unix_s, ...facts }) => {
    const item = element("li");
    const told = Object.entries(facts).map(fact).filter(Boolean).join(", ");
    const bar = element("progress");
    bar.max = end;
    bar.value = at_s;
    item.append(element("b", event), element("span", seconds(at_s) === "–" ? "0 ms" : seconds(at_s)),
      element("small", told), bar);
    return item;
  }));
  box.showModal();
}

async function refresh() {
  try {
    const [ready, cluster, requests] = await Promise.all([
      json("/readyz"), json("/v1/cluster"), json("/v1/requests?limit=50"),
    ]);
    if (round++ % METRICS_EVERY === 0) {
      const page = await fetch("/metrics", { cache: "no-store" });
      drawFigures(await page.text(), cluster);
    }
    byId("model").textContent = cluster.model ?? "";
    byId("state").textContent = ready.status;
    byId("state").className = `pill ${{ ready: "good", degraded: "warn" }[ready.status] ?? "bad"}`;
    byId("degraded").replaceChildren(...ready.degraded.map((text) => element("li", text)));
    drawNodes(cluster.nodes ?? []);
    drawRequests(requests.data);
  } catch (error) {
    byId("state").textContent = "the conductor does not answer";
    byId("state").className = "pill bad";
  } finally {
    setTimeout(refresh, EVERY_MS);
  }
}

refresh();
