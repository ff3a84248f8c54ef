// A report of a cluster and its benchmarks, drawn from the data in this file, without network access.
import { byId, element, fromTemplate, row, scrolling, table, within } from "./elements.js";
import { arrived } from "./frames.js";
import { record } from "./history.js";
import { benchmarkView, verdictOf } from "./panels/benchmark_report.js";
import { timelineView } from "./panels/timeline.js";
import { drawState } from "./state.js";
import { startTheme } from "./theme.js";
import * as cache from "./views/cache.js";
import * as cluster from "./views/cluster.js";
import * as fleet from "./views/fleet.js";
import * as latency from "./views/latency.js";
import * as requests from "./views/requests.js";
import * as transfers from "./views/transfers.js";

const VIEWS = { cluster, cache, transfers, requests, latency, fleet };
const WHOLE = ["cluster", "transfers", "latency", "fleet"]; // not a tenant's

const data = JSON.parse(byId("report-data").textContent);
const main = document.querySelector("main");

const moment = (unix_s) => new Date(unix_s * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";

function section(id, title, ...children) {
  const made = within("section", "", element("h2", title), ...children);
  made.id = id;
  const link = element("a", title.toLowerCase());
  link.href = `#${id}`;
  document.querySelector("nav").append(" ", link);
  return made;
}

function facts(pairs) {
  return scrolling("About", table(["what", "value"], pairs.map(([name, value]) => row(name, String(value)))));
}

function about() {
  const { cluster, about: told } = data;
  const pairs = [["made", `${moment(data.made_unix_s)} by moonpool ${data.moonpool}`]];
  if (!told) return section("about", "About", facts(pairs));
  const versions = Object.entries(told.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  pairs.push(["cluster", data.url], ["watched for", `${data.seconds} s`], ["conductor", cluster?.conductor_id ?? "–"],
    ["its code", `moonpool ${told.moonpool}${told.commit ? `, commit ${told.commit}` : ""}`],
    ["serves since", moment(told.started_unix_s)], ["its machine", told.machine], ["its versions", versions]);
  if (cluster) pairs.push(["model", `${cluster.model}, ${cluster.dtype}, ${cluster.block_size} tokens a block`]);
  for (const node of cluster?.nodes ?? []) {
    const known = Object.entries(node.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
    if (known) pairs.push([node.node_id, known]);
  }
  return section("about", "About", facts(pairs));
}

function options() {
  const shown = (one) => row(within("th", "id", one.key), JSON.stringify(one.value), one.unit);
  const changed = data.about.options.filter((one) => one.changed);
  const all = table(["option", "value", "unit"], data.about.options.map(shown));
  return section("options", "Options",
    element("p", changed.length ? "Those that differ from the defaults:" : "All are at their defaults.", "soft"),
    scrolling("Options that differ", table(["option", "value", "unit"], changed.map(shown))),
    within("details", "", element("summary", `All ${data.about.options.length}`), scrolling("All options", all)));
}

function timelines() {
  const articles = data.timelines.map(({ id, timeline }, at) => {
    const article = within("article", "card", element("h3", id), ...timelineView(timeline));
    article.id = `timeline-${at}`;
    return article;
  });
  return section("timelines", "Timelines", ...articles);
}

function benchmarks() {
  return section("benchmarks", "Benchmarks", ...data.benchmarks.map(({ name, report }) =>
    within("article", "card benchmark", element("h3", name), element("p", verdictOf(report.rows)), ...benchmarkView(report))));
}

function timelineHref(id) {
  const at = data.timelines.findIndex((one) => one.id === id);
  return at < 0 ? "" : `#timeline-${at}`;
}

// All views, one below the other.
function views(frame) {
  const page = { live: false, param: () => "", range: () => Infinity, timelineHref };
  return Object.entries(VIEWS).filter(([id]) => frame.isWhole || !WHOLE.includes(id)).map(([id, view]) => {
    const made = section(id, id[0].toUpperCase() + id.slice(1), ...fromTemplate(`view-${id}`, false).children);
    made.classList.add("view");
    made.querySelectorAll("h2").forEach((heading, at) => { if (at) heading.remove(); });
    main.append(made);
    const mounted = view.mount(made, page);
    mounted.draw(frame);
    return mounted;
  });
}

document.querySelectorAll("[data-only=live]").forEach((part) => part.remove());
document.title = data.title;
document.querySelector("h1").textContent = data.title;
document.body.classList.add("document");
main.append(about());
let drawn = [];
if (data.samples) {
  byId("about").after(options());
  let frame;
  for (const sample of data.samples) record(frame = arrived(sample));
  drawState(frame.now);
  drawn = views(frame);
  if (data.timelines.length) main.append(timelines());
} else {
  document.querySelectorAll("[data-only=cluster]").forEach((part) => part.remove());
}
if (data.benchmarks.length) main.append(benchmarks());
startTheme(() => drawn.forEach((view) => view.recolour()));
// Expand everything for print.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
