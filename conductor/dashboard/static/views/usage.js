// What tenants and models took, and what their nodes did with their time: /v1/usage, by day.
import { cell, element, format, json, patch, percent, row, scrolling, table } from "../elements.js";

const EVERY_MS = 5000;
const DAYS = 7;
const rounded = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);
const duration = (value) => cell(value < 600 ? `${rounded.format(value)} s` : `${rounded.format(value / 3600)} h`, "number");
const amount = (value) => cell(value === null ? "–" : rounded.format(value), "number");
const joules = (value) => cell(typeof value === "number" ? `${rounded.format(value / 3600)} Wh` : value, "number");

// The causes of waste, the largest first, as a text.
function causes(wasted) {
  const told = Object.entries(wasted).sort((a, b) => b[1] - a[1]).map(([cause, value]) => `${cause} ${rounded.format(value)} s`);
  const made = cell(told.join(", ") || "none", "soft cut");
  made.title = made.textContent;
  return made;
}

const tenantRow = (one) => row(
  one.day, cell(one.model, "cut"), cell(one.tenant || "–", "cut"), one.requests, one.prompt_tokens, one.output_tokens, duration(one.seconds.useful),
  duration(sum(one.seconds.wasted)), causes(one.seconds.wasted), amount(one.cost), amount(one.tokens_per_unit));

const nodesRow = ({ day, model, seconds: spent, cost, tokens_per_unit: each, joules: energy }) => row(
  day, cell(model, "cut"), duration(spent.wall), cell(percent(spent.useful / spent.wall), "number"), cell(percent(sum(spent.wasted) / spent.wall), "number"),
  cell(percent(spent.idle / spent.wall), "number"), causes(spent.wasted), amount(cost), amount(each), joules(energy.gpus), joules(energy.processors));

const TENANTS = ["day", "model", "tenant", "requests", "prompt tokens", "output tokens", "useful", "wasted", "for", "cost", "tokens per unit"];
const NODES = ["day", "model", "whole time", "useful", "wasted", "idle", "wasted for", "cost", "tokens per unit", "GPU energy", "CPU energy"];

export function mount(root) {
  const [nodes, tenants] = root.querySelectorAll("section > div"), state = root.querySelector(".count");
  let isOver = false;

  async function read() {
    let found;
    try {
      found = await json(`/v1/usage?days=${DAYS}`);
    } catch (error) {
      if (!isOver) state.textContent = `Not read: ${error.message}`;
      return;
    }
    if (isOver) return;
    const newest = (rows) => [...rows].reverse();
    state.textContent = `${format.format(DAYS)} days, UTC; cost at today's price (model.price)`;
    nodes.parentElement.hidden = !found.nodes;
    const whole = newest(found.nodes ?? []).filter((one) => one.seconds.wall > 0);
    patch(nodes, [whole.length ? scrolling("Nodes by day", table(NODES, whole.map(nodesRow))) : element("p", "No node has told its time yet.", "none")]);
    patch(tenants, [found.data.length ? scrolling("Tenants by day", table(TENANTS, newest(found.data).map(tenantRow))) : element("p", "No request has ended yet.", "none")]);
  }

  read();
  const timer = setInterval(() => { if (!document.hidden) read(); }, EVERY_MS);
  return { draw() {}, recolour() {}, unmount: () => { isOver = true; clearInterval(timer); } };
}
