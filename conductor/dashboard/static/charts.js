// Line charts of the last minutes. The page keeps at most this many seconds.
import { byId } from "./elements.js";

const KEPT = 600; // seconds
const CHARTS = {
  "chart-tokens": { series: [["generated", "--accent"], ["prompt", "--soft"]] },
  "chart-requests": { series: [["running", "--accent"], ["waiting", "--warn"]] },
  "chart-goodput": { series: [["ended", "--soft"], ["good", "--good"], ["refused", "--bad"]] },
  "chart-hits": { series: [["own", "--good"], ["another node", "--accent"]], max: 100 },
  "chart-moved": { series: [["moved", "--accent"]] },
};

const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString([], { hour12: false });

const drawn = new Map();
const times = [];

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function resolve(name) {
  // light-dark() resolves only on an element.
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found || colour(name);
}

function make(id) {
  const { series, max } = CHARTS[id];
  const box = byId(id);
  const axis = { stroke: resolve("--soft"), grid: { stroke: resolve("--line"), width: 1 }, ticks: { show: false }, size: 44 };
  const options = {
    width: box.clientWidth || 300,
    height: 130,
    cursor: { drag: { x: false, y: false } },
    legend: { show: series.length > 1, live: false },
    scales: { y: { range: (_, low, high) => [0, max ?? Math.max(high * 1.1, 1)] } },
    axes: [{ ...axis, size: 24, space: 90, values: (_, at) => at.map(clock) }, axis],
    series: [{}, ...series.map(([label, stroke]) => ({ label, stroke: resolve(stroke), width: 1.5, points: { show: false } }))],
  };
  const data = drawn.get(id)?.data ?? series.map(() => []);
  drawn.get(id)?.plot.destroy();
  drawn.set(id, { data, plot: new uPlot(options, [times, ...data], box) });
}

export function redraw() { if (drawn.size) Object.keys(CHARTS).forEach(make); }

export function add(unix_s, values) {
  if (!drawn.size) Object.keys(CHARTS).forEach(make);
  times.push(unix_s);
  const full = times.length > KEPT;
  if (full) times.shift();
  for (const [id, { data, plot }] of drawn) {
    values[id].forEach((value, position) => {
      data[position].push(value);
      if (full) data[position].shift();
    });
    plot.setData([times, ...data]);
  }
}

addEventListener("resize", () => {
  for (const [id, { plot }] of drawn) plot.setSize({ width: byId(id).clientWidth, height: 130 });
});

// Number of seconds kept; for tests.
export const kept = () => times.length;
