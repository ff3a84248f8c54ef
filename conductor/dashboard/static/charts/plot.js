// A line or area chart over time that fills its box. Its legend, in the caption, has the latest values or those at the cursor.
import { clock, element, within } from "../elements.js";
import { colour } from "../theme.js";

const LEAST_S = 30; // width of the time axis of a page that was just opened
const FALLBACK = { width: 300, height: 120 };

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export class Plot {
  // ``series``: [label, name of a colour]. ``stacked``: areas on top of each other, the first at the bottom; those without
  // a value above zero are left out. ``max``: of the y axis. ``show``: a value as text. ``least``: the y axis's least maximum.
  constructor(box, series, { stacked = false, max, show = (value) => compact.format(value), least = 1 } = {}) {
    Object.assign(this, { box, series, stacked, max, show, least, plot: undefined, shown: "", data: [[]], times: [] });
    this.legend = element("span", undefined, "legend");
    box.parentElement.querySelector("figcaption")?.append(this.legend);
    box.classList.add("plot");
    this.observer = new ResizeObserver(() => this.plot?.setSize(this.#size()));
    this.observer.observe(box);
  }

  // ``data``: times, then a column for each series. ``range_s``: width of the time axis, at most.
  draw([times, ...columns], range_s, until) {
    const used = this.series.map((_, at) => at).filter((at) => !this.stacked || columns[at].some((value) => value > 0));
    const key = used.join();
    if (!this.plot || key !== this.shown) this.#make(used);
    this.shown = key;
    this.times = times;
    this.columns = used.map((at) => columns[at]);
    this.edges = [Math.max(until - range_s, Math.min(times[0] ?? until, until - LEAST_S)), until];
    this.plot.setData([times, ...(this.stacked ? this.#stack() : this.columns)]);
    this.#say(this.plot.cursor.idx);
  }

  // Make it anew, with other colours.
  recolour() {
    if (this.plot) this.#make(this.used);
  }

  remove() {
    this.observer.disconnect();
    this.plot?.destroy();
  }

  #size() { return { width: this.box.clientWidth || FALLBACK.width, height: this.box.clientHeight || FALLBACK.height }; }

  // The top area comes first: those below are painted over it.
  #stack() {
    const sums = new Array(this.times.length).fill(0);
    return this.columns.map((column) => column.map((value, at) => (sums[at] += value ?? 0))).reverse();
  }

  #make(used) {
    this.used = used;
    this.plot?.destroy();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const lines = used.map((at) => {
      const stroke = colour(this.series[at][1]);
      return { label: this.series[at][0], stroke, fill: this.stacked ? stroke : undefined, width: this.stacked ? 0 : 1.5, points: { show: false } };
    });
    if (this.stacked) lines.reverse();
    this.plot = new uPlot({
      ...this.#size(),
      padding: [8, 24, 0, 0],
      cursor: { drag: { x: false, y: false }, sync: { key: "time" }, points: { show: !this.stacked } },
      legend: { show: false },
      scales: { x: { range: () => this.edges ?? [0, 1] }, y: { range: (_, low, high) => [0, this.max ?? Math.max(high * 1.1, this.least)] } },
      axes: [{ ...axis, size: 22, space: 80, values: (_, at) => at.map(clock) }, { ...axis, size: 58, space: (...[, , , , height]) => Math.max(28, height / 5), values: (_, at) => at.map((value) => (value ? this.show(value).replace(/\.0+(?= |$)/, "") : "0")) }],
      series: [{}, ...lines],
      hooks: { setCursor: [(plot) => this.#say(plot.cursor.idx)] },
    }, [this.times, ...(this.columns ? (this.stacked ? this.#stack() : this.columns) : used.map(() => []))], this.box);
  }

  #say(at) {
    if (!this.columns) return;
    const index = at ?? this.times.length - 1;
    this.legend.replaceChildren(...this.used.map((number, place) => {
      const [label, name] = this.series[number], value = this.columns[place][index];
      const mark = element("i");
      mark.style.background = `var(${name})`;
      return within("span", "", mark, `${label} `, element("b", value === null || value === undefined ? "–" : this.show(value)));
    }));
  }
}

// Charts of a view: draw, recolour and remove them together. ``charts``: [id of the box, names in the history, series, options].
export class Plots {
  constructor(root, charts, history) {
    this.history = history;
    this.charts = charts.map(([id, names, series, options]) => ({ names, plot: new Plot(root.querySelector(`#${id}`), series, options) }));
  }

  draw(range_s, until) {
    for (const { names, plot } of this.charts) plot.draw(this.history.over(range_s, until, names), range_s, until);
  }

  recolour() { this.charts.forEach(({ plot }) => plot.recolour()); }

  remove() { this.charts.forEach(({ plot }) => plot.remove()); }
}
