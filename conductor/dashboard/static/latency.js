// Service quality: latencies against the SLO, goodput, rejections, and prediction errors.
import { bars, byId, cell, element, fill, format, patch, percent, row, say, seconds, svg, within } from "./elements.js";
import { rate } from "./rates.js";

const STAGES = {
  limit: "over a limit", arrival: "SLO, at arrival", decode: "SLO, after prefill", nodes: "nodes refused",
};
const ESTIMATES = { ttft: "first token", prefill: "prefill", step: "decode steps", transfer: "transfer" };
const SIZE = 170, EDGE = 26;

// A histogram's non-empty buckets, and the fraction within the limit.
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

function goal(slo) {
  const parts = [slo.ttft_s && `a first token in ${seconds(slo.ttft_s)}`, slo.tbt_s && `${seconds(slo.tbt_s)} a token`].filter(Boolean);
  return parts.length ? parts.join(" and ") : "no SLO is set: all that ended well";
}

function drawGoodput(now) {
  const ended = Object.values(now.metrics.requests ?? {}).reduce((sum, count) => sum + count, 0);
  const good = now.metrics.requests_within_slo, away = Object.values(now.rejections).reduce((sum, count) => sum + count, 0);
  const told = `${format.format(good)} of ${format.format(ended)} sequences that ended (${percent(good / ended)}), `
    + `${rate(now, "requests_within_slo").toFixed(1)} a second now; ${format.format(away)} requests rejected.`;
  say(byId("goodput"), ended || away ? `Good, that is ${goal(now.slo)}: ${told}` : `Good is ${goal(now.slo)}.`);
  const ends = Object.entries(now.metrics.requests ?? {}).sort((a, b) => b[1] - a[1]);
  bars(byId("ends"), ends);
  bars(byId("rejections"), Object.entries(now.rejections).map(([stage, count]) => [STAGES[stage] ?? stage, count]));
  bars(byId("placements"), Object.entries(now.placements));
  bars(byId("placement-paths"), Object.entries(now.placement_paths));
}

export function drawService(now) {
  drawLatency("ttft", now.metrics.time_to_first_token_seconds, now.slo.ttft_s);
  drawLatency("gap", now.metrics.inter_token_latency_seconds, now.slo.tbt_s);
  drawLatency("tpot", now.metrics.time_per_output_token_seconds, now.slo.tbt_s);
  drawGoodput(now);
}

// Both axes are logarithmic with one scale: points on the line were predicted exactly.
function scatter(title, pairs) {
  const values = pairs.flat().filter((value) => value > 0);
  const low = Math.floor(Math.log10(Math.min(...values))), high = Math.max(Math.ceil(Math.log10(Math.max(...values))), low + 1);
  const at = (value) => ((Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)) * SIZE;
  const picture = svg("svg", { viewBox: `0 0 ${SIZE + EDGE + 4} ${SIZE + EDGE + 4}`, width: SIZE + EDGE + 4, height: SIZE + EDGE + 4, role: "img",
    "aria-label": `${title}: the latest ${pairs.length} estimates against what was measured; the table says how far off they are` });
  picture.append(svg("line", { x1: EDGE, y1: SIZE + 4, x2: EDGE + SIZE, y2: 4, class: "tick" }));
  for (let power = low; power <= high; power += 1) {
    const place = at(10 ** power), label = seconds(10 ** power).replace(/\.0+ /, " ");
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

export function drawEstimates(now) {
  const shown = (value) => cell(value === null ? "–" : `${value.toFixed(1)} %`, "number");
  fill(byId("cost").querySelector("table"), Object.entries(now.cluster.prediction_errors).map(([name, error]) =>
    row(ESTIMATES[name] ?? name, error.count, shown(error.p50_percent), shown(error.p90_percent))));
  patch(byId("scatter"), Object.entries(now.predictions).filter(([, pairs]) => pairs.some(([one, other]) => one > 0 && other > 0))
    .map(([name, pairs]) => scatter(ESTIMATES[name] ?? name, pairs)));
}
