// Transfers: a matrix of pairs of nodes by a figure of choice, their list, and paths over all nodes.
import { Matrix } from "../charts/matrix.js";
import { Plots } from "../charts/plot.js";
import { byId, bytes, cell, element, fill, format, row, say, seconds } from "../elements.js";
import * as history from "../history.js";
import { List } from "../list.js";

const CHARTS = [["chart-moved", ["moved"], [["moved", "--accent"]]]];
const perSecond = (value) => `${bytes(value)}/s`;
const moving = (one) => (one.seconds ? one.nbytes / one.seconds : 0);
const latency = (route) => (route.transfers ? route.seconds / route.transfers : 0);
// Figures of a pair: its value, as text, and the colour of the most.
const MEASURES = {
  rate: { of: (route) => route.rate, show: perSecond, tone: "--accent" },
  moving: { of: moving, show: perSecond, tone: "--accent" },
  latency: { of: latency, show: seconds, tone: "--c-violet" },
  failures: { of: (route) => route.failures, show: (value) => format.format(value), tone: "--bad" },
};

const number = (text) => cell(text, "number");
const count = (value) => cell(format.format(value), value ? "number bad" : "number");
const pairOf = (route) => `${route.source} → ${route.target}`;

const COLUMNS = [
  { title: "from", width: 96, cell: (route) => element("th", route.source), by: (route) => route.source },
  { title: "to", width: 96, cell: (route) => route.target, by: (route) => route.target },
  { title: "path", width: 52, cell: (route) => route.transport || "–", by: (route) => route.transport },
  { title: "now", width: 82, cell: (route) => number(perSecond(route.rate)), by: (route) => route.rate },
  { title: "moving", width: 82, cell: (route) => number(route.seconds ? perSecond(moving(route)) : "–"), by: moving },
  { title: "moved", width: 74, cell: (route) => number(bytes(route.nbytes)), by: (route) => route.nbytes },
  { title: "count", width: 62, cell: (route) => route.transfers, by: (route) => route.transfers },
  { title: "each", width: 74, cell: (route) => number(seconds(latency(route))), by: latency },
  { title: "failed", width: 62, cell: (route) => count(route.failures), by: (route) => route.failures },
];

function drawPaths(paths) {
  fill(byId("paths"), paths.map((path) => row(path.path, number(perSecond(path.rate)), number(path.seconds ? perSecond(moving(path)) : "–"),
    number(bytes(path.nbytes)), path.batches, ...[50, 90, 95, 99].map((share) => number(seconds(path[`p${share}_s`]))),
    path.in_flight, count(path.failures), count(path.retries))));
}

export function mount(root, page) {
  const plots = new Plots(root, CHARTS, history), box = root.querySelector("#matrix");
  const measure = root.querySelector("#measure"), search = root.querySelector("[type=search]"), readout = box.querySelector(".readout");
  const list = new List(root.querySelector("#routes"), {
    label: "Transfers by pair", columns: COLUMNS, key: pairOf, none: ["No transfers yet."], live: page.live,
    sorted: (sort) => page.change({ sort }), picked: (pair) => page.change({ pair: page.param("pair") === pair ? "" : pair }, true),
  });
  const pick = (route) => page.change({ pair: route && page.param("pair") !== pairOf(route) ? pairOf(route) : "" }, true);
  const matrix = new Matrix(box.querySelector("canvas"), (route) => { pointed = route; tell(); }, pick);
  let pointed, chosen;
  if (page.live) {
    measure.onchange = () => page.change({ by: measure.value === "moving" ? "" : measure.value });
    search.oninput = () => page.change({ q: search.value });
  }

  function tell() {
    const route = pointed ?? chosen;
    say(readout, route ? `${pairOf(route)}: ${perSecond(route.rate)} now, ${route.seconds ? perSecond(moving(route)) : "–"} while moving, ${seconds(latency(route))} each, ${format.format(route.failures)} failed` : "");
  }

  function draw(frame) {
    const by = MEASURES[page.param("by")] ? page.param("by") : "moving", { of, show, tone } = MEASURES[by];
    const asked = page.param("q").toLowerCase();
    if (page.live) {
      measure.value = by;
      if (document.activeElement !== search) search.value = page.param("q");
    }
    const shown = frame.routes.filter((route) => !asked || pairOf(route).toLowerCase().includes(asked))
      .sort((a, b) => of(b) - of(a) || b.nbytes - a.nbytes);
    plots.draw(page.range(), frame.now.unix_s);
    chosen = shown.find((route) => pairOf(route) === page.param("pair"));
    pointed = pointed && shown.find((route) => pairOf(route) === pairOf(pointed));
    tell();
    const canvas = box.querySelector("canvas");
    canvas.hidden = !shown.length;
    const range = matrix.draw(shown, of, tone, (route) => route === chosen);
    canvas.setAttribute("aria-label", `${shown.length} pairs of nodes, coloured by ${measure?.selectedOptions[0].text ?? "bandwidth while moving"}; the list of pairs has the same figures`);
    box.querySelector(".none").hidden = shown.length > 0;
    say(box.querySelector(".none"), frame.routes.length ? "No pair has a node of this name." : "No transfers yet.");
    drawScale(range, show, tone);
    list.sortBy(page.param("sort"));
    list.draw(shown, page.param("pair"));
    say(root.querySelector(".count"), page.live ? `${format.format(shown.length)} of ${format.format(frame.routes.length)} pairs` : "");
    drawPaths(frame.paths);
  }

  function drawScale(range, show, tone) {
    const scale = box.querySelector(".scale");
    scale.hidden = !range;
    if (!range) return;
    say(scale.firstElementChild, show(range.low));
    say(scale.lastElementChild, show(range.high));
    scale.querySelector("i").style.color = `var(${tone})`;
  }

  return { draw, recolour: () => plots.recolour(), unmount: () => { plots.remove(); list.remove(); } };
}
