// Latencies over time, against the SLO; goodput, rejections, placements, and prediction errors.
import { Plots } from "../charts/plot.js";
import { bars, byId, cell, element, fill, format, patch, percent, row, say, seconds, svg, within } from "../elements.js";
import * as history from "../history.js";

const STAGES = {
  limit: "over a limit", arrival: "SLO, at arrival", decode: "SLO, after prefill", nodes: "nodes refused",
};
const ESTIMATES = { ttft: "first token", prefill: "prefill", step: "decode steps", transfer: "transfer" };
const SIZE = 150, EDGE = 26;

const LINES = [["p50", "--good"], ["p90", "--accent"], ["p95", "--c-violet"], ["p99", "--c-orange"]];
const CHARTS = Object.keys(history.HISTOGRAMS).map((id) =>
  [id, history.QUANTILES.map((share) => `${id}-${share}`), LINES, { show: seconds, least: 0.001 }]);

// The mean so far, and the fraction within the limit.
function drawSums(id, histogram, limit_s) {
  const buckets = histogram.buckets.map(([le, count]) => [le === "+Inf" ? Infinity : Number(le), count]);
  const all = buckets.at(-1)[1], kept = buckets.findLast(([le]) => le <= limit_s)?.[1] ?? 0;
  const mean = all ? `Mean so far ${seconds(histogram.sum / all)} of ${format.format(all)}` : "None yet";
  const within = limit_s && all ? `; at least ${percent(kept / all)} within ${seconds(limit_s)}` : "";
  say(byId(id).closest("section").querySelector("p"), `${mean}${within}.`);
}

function goal(slo) {
  const parts = [slo.ttft_s && `a first token in ${seconds(slo.ttft_s)}`, slo.tbt_s && `${seconds(slo.tbt_s)} a token`].filter(Boolean);
  return parts.length ? `Good is ${parts.join(" and ")}.` : "No SLO is set: all that ended well are good.";
}

function drawGoodput(frame) {
  const { now } = frame;
  const ended = Object.values(now.metrics.requests ?? {}).reduce((sum, count) => sum + count, 0);
  const good = now.metrics.requests_within_slo, away = Object.values(now.rejections).reduce((sum, count) => sum + count, 0);
  const told = `${format.format(good)} of ${format.format(ended)} sequences that ended were good (${percent(good / ended)}), `
    + `${frame.rate("requests_within_slo").toFixed(1)} a second now; ${format.format(away)} requests rejected. `;
  say(byId("goodput"), (ended || away ? told : "") + goal(now.slo));
  const ends = Object.entries(now.metrics.requests ?? {}).sort((a, b) => b[1] - a[1]);
  bars(byId("ends"), ends);
  bars(byId("rejections"), Object.entries(now.rejections).map(([stage, count]) => [STAGES[stage] ?? stage, count]));
  bars(byId("placements"), Object.entries(now.placements));
  bars(byId("placement-paths"), Object.entries(now.placement_paths));
}

// Both axes are logarithmic with one scale: points on the line were predicted exactly.
function scatter(title, pairs) {
  const values = pairs.flat().filter((value) => value > 0);
  const low = Math.floor(Math.log10(Math.min(...values))), high = Math.max(Math.ceil(Math.log10(Math.max(...values))), low + 1);
  const every = Math.ceil((high - low + 1) / 3); // labels that fit
  const at = (value) => ((Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)) * SIZE;
  const picture = svg("svg", { viewBox: `0 0 ${SIZE + EDGE + 4} ${SIZE + EDGE + 4}`, width: SIZE + EDGE + 4, height: SIZE + EDGE + 4, role: "img",
    "aria-label": `${title}: the latest ${pairs.length} estimates against what was measured; the table says how far off they are` });
  picture.append(svg("line", { x1: EDGE, y1: SIZE + 4, x2: EDGE + SIZE, y2: 4, class: "tick" }));
  for (let power = low; power <= high; power += 1) {
    const place = at(10 ** power), label = (power - low) % every ? "" : seconds(10 ** power).replace(/\.0+ /, " ");
    picture.append(svg("line", { x1: EDGE + place, y1: 4, x2: EDGE + place, y2: SIZE + 4, class: "tick" }),
      svg("line", { x1: EDGE, y1: SIZE + 4 - place, x2: EDGE + SIZE, y2: SIZE + 4 - place, class: "tick" }),
      svg("text", { x: EDGE + place, y: SIZE + 18, class: "tier", "text-anchor": power === high ? "end" : "middle" }, label));
  }
  for (const [predicted, actual] of pairs) {
    const dot = svg("circle", { cx: EDGE + at(predicted), cy: SIZE + 4 - at(actual), r: 2.5, class: "dot" });
    dot.append(svg("title", {}, `predicted ${seconds(predicted)}, measured ${seconds(actual)}`));
    picture.append(dot);
  }
  picture.append(svg("text", { x: 10, y: SIZE / 2, class: "tier", transform: `rotate(-90 10 ${SIZE / 2})`, "text-anchor": "middle" }, "measured"));
  return within("figure", "", element("figcaption", `${title}, predicted →`), picture);
}

function drawEstimates(now) {
  const shown = (value) => cell(value === null ? "–" : `${value.toFixed(1)} %`, "number");
  fill(byId("cost").querySelector("table"), Object.entries(now.cluster.prediction_errors).map(([name, error]) =>
    row(ESTIMATES[name] ?? name, error.count, ...[50, 90, 95, 99].map((share) => shown(error[`p${share}_percent`])))));
  patch(byId("scatter"), Object.entries(now.predictions).filter(([, pairs]) => pairs.some(([one, other]) => one > 0 && other > 0))
    .map(([name, pairs]) => scatter(ESTIMATES[name] ?? name, pairs)));
}

export function mount(root, page) {
  const plots = new Plots(root, CHARTS, history);

  function draw(frame) {
    const { metrics, slo } = frame.now;
    plots.draw(page.range(), frame.now.unix_s);
    for (const [id, name] of Object.entries(history.HISTOGRAMS)) {
      drawSums(id, metrics[name], { ttft: slo.ttft_s, gap: slo.tbt_s, tpot: slo.tbt_s }[id]);
    }
    drawGoodput(frame);
    drawEstimates(frame.now);
  }

  return { draw, recolour: () => plots.recolour(), unmount: () => plots.remove() };
}
