// The cluster now: its figures, what they were, its nodes and its events.
import { NodeGrid } from "../charts/node_grid.js";
import { Plots } from "../charts/plot.js";
import { byId, bytes, clock, element, format, patch, percent, say, within } from "../elements.js";
import * as history from "../history.js";
import { stateOf } from "../nodes.js";
import { byRole, drawMap } from "../panels/cluster_map.js";

const DRAWN = 16; // more nodes than these are squares of a grid
const EVENTS_SHOWN = 60;
const CHARTS = [
  ["chart-tokens", ["generated", "prompt"], [["generated", "--accent"], ["prompt", "--soft"]]],
  ["chart-requests", ["running", "waiting"], [["running", "--accent"], ["waiting", "--warn"]]],
  ["chart-goodput", ["ended", "good", "refused"], [["ended", "--soft"], ["good", "--good"], ["refused", "--bad"]]],
  ["chart-hits", ["own", "another"], [["own", "--good"], ["another node", "--accent"]], { max: 100, show: (value) => `${Math.round(value)} %` }],
];

// Of the last second; of all time where nothing was generated in it. A prefill counts as a step.
function tokensPerStep(frame) {
  const tokens = frame.rate("output_tokens"), accepted = frame.rate("accepted_tokens");
  const { output_tokens: all, accepted_tokens: ofAll } = frame.now.metrics;
  return tokens > accepted ? tokens / (tokens - accepted) : all / (all - ofAll);
}

function drawNow(frame) {
  const { metrics, cluster } = frame.now;
  const moved = frame.routes.reduce((sum, route) => sum + route.rate, 0);
  const figures = [
    ["running", format.format(metrics.running_requests), "requests running"],
    ["waiting", format.format(metrics.waiting_requests), "wait for a first token"],
    ["tokens", format.format(Math.round(frame.rate("output_tokens"))), "tokens a second"],
    ...(metrics.accepted_tokens ? [["step", format.format(tokensPerStep(frame)), "tokens a step"]] : []),
    ["hits", percent(metrics.prefix_hit_tokens / metrics.prefix_queried_tokens), "of prompts cached"],
    ["moved", `${bytes(moved)}/s`, "moved now"],
    ["blocks", format.format(cluster.index.num_blocks), "blocks in the index"],
    ["index", cluster.index.connected ? `${Math.round(1000 * cluster.index.lag_s)} ms` : "lost", cluster.index.connected ? "behind the index" : "Redis does not answer"],
  ];
  patch(byId("now"), figures.map(([id, value, name]) => {
    const card = within("div", "", element("b", value), element("span", name));
    card.dataset.figure = id;
    return card;
  }));
}

function drawEvents(events) {
  const list = byId("events").querySelector("ol");
  list.hidden = events.length === 0;
  byId("events").querySelector(".none").hidden = events.length > 0;
  patch(list, [...events].reverse().slice(0, EVENTS_SHOWN).map((event) => {
    const item = element("li", undefined, { left: "bad", unhealthy: "bad", joined: "good", healthy: "good", retry: "warn" }[event.kind]);
    item.append(element("time", clock(event.unix_s)),
      element("b", `${event.kind} ${event.node}`), element("span", event.text));
    return item;
  }));
}

export function mount(root, page) {
  const plots = new Plots(root, CHARTS, history), box = root.querySelector("#map .scroll"), readout = root.querySelector("#map .readout");
  const canvas = element("canvas");
  canvas.setAttribute("role", "img");
  const open = (id) => page.live && page.go("fleet", { node: id });
  const grid = new NodeGrid(canvas, (node) => { pointed = node; tell(); }, (node) => node && open(node.node_id));
  let pointed, all = "";
  const tell = () => say(readout, pointed ? `${pointed.node_id}: ${stateOf(pointed)}` : all);
  box.querySelector("svg").onclick = (event) => {
    const node = event.target.closest("[data-node]");
    if (node) open(node.dataset.node);
  };

  function draw(frame) {
    drawNow(frame);
    plots.draw(page.range(), frame.now.unix_s);
    const many = frame.nodes.length > DRAWN, ready = frame.nodes.filter((node) => node.state === "ready").length;
    const legend = many ? "; a square is a node, and a stronger colour a fuller pool" : "";
    all = `${format.format(ready)} of ${format.format(frame.nodes.length)} ready${legend}`;
    tell();
    if (many !== canvas.isConnected) {
      box.querySelector("svg").toggleAttribute("hidden", many);
      if (many) box.append(canvas);
      else canvas.remove();
    }
    if (many) {
      canvas.setAttribute("aria-label", `${all}; Fleet lists them`);
      grid.draw(byRole(frame.nodes));
    } else {
      drawMap(box.querySelector("svg"), frame.nodes, frame.routes);
    }
    drawEvents(frame.now.events);
  }

  return { draw, recolour: () => plots.recolour(), unmount: () => plots.remove() };
}
