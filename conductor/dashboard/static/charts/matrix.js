// A matrix of pairs of nodes: rows send, columns receive, and the colour is the figure of the pair. For up to some hundred nodes.
import { compareNames } from "../nodes.js";
import { colour } from "../theme.js";
import { cleared, pointed } from "./canvas.js";

const LABELLED = 14, LARGEST = 96; // sizes of a cell, pixels
const LEAST = 2.5; // a cell is drawn at least so large
const NEAR = 8; // pixels: the pointer finds the closest pair within
const LETTER = 6.6, LETTERS = 16;

const short = (name) => (name.length > LETTERS ? `${name.slice(0, LETTERS - 1)}…` : name);

export class Matrix {
  // ``told(pair)``: the pointer is over a pair, or over none. ``picked(pair)``: it was clicked.
  constructor(canvas, told, picked) {
    Object.assign(this, { canvas, cells: [] });
    pointed(canvas, (x, y) => told(this.#at(x, y)), (x, y) => picked(this.#at(x, y)));
  }

  // ``pairs``: [{source, target, …}]; ``value(pair)``: null or zero is no colour. ``isChosen(pair)``: it has a frame.
  draw(pairs, value, tone, isChosen) {
    const { context, width, height } = cleared(this.canvas);
    const names = (key) => [...new Set(pairs.map((pair) => pair[key]))].sort(compareNames);
    const rows = names("source"), columns = names("target");
    this.cells = [];
    if (!rows.length || !width) return undefined;
    const letters = (all) => LETTER * Math.max(...all.map((name) => short(name).length)) + 10;
    const size = (left, top) => Math.min(LARGEST, (width - left) / columns.length, (height - top) / rows.length);
    let [left, top] = [letters(rows), letters(columns)], cell = size(left, top);
    const labelled = cell >= LABELLED;
    if (!labelled) { [left, top] = [0, 0]; cell = size(0, 0); }
    const across = labelled ? cell : Math.min(LARGEST, (width - left) / columns.length), down = labelled ? cell : Math.min(LARGEST, (height - top) / rows.length);
    context.fillStyle = colour("--back");
    context.fillRect(left, top, across * columns.length, down * rows.length);
    if (labelled) this.#names(context, rows, columns, left, top, cell);
    const values = pairs.map(value).filter((one) => one > 0);
    const low = Math.min(...values), high = Math.max(...values);
    const strength = (one) => (high > low ? 0.2 + 0.8 * Math.log(one / low) / Math.log(high / low) : 1);
    const row = new Map(rows.map((name, at) => [name, at])), column = new Map(columns.map((name, at) => [name, at]));
    for (const pair of pairs) {
      const x = left + column.get(pair.target) * across, y = top + row.get(pair.source) * down, one = value(pair);
      const w = Math.max(across - 1, LEAST), h = Math.max(down - 1, LEAST);
      context.globalAlpha = one > 0 ? strength(one) : 1;
      context.fillStyle = colour(one > 0 ? tone : "--line");
      context.fillRect(x, y, w, h);
      context.globalAlpha = 1;
      if (isChosen(pair)) {
        context.strokeStyle = colour("--text");
        context.lineWidth = 2;
        context.strokeRect(x, y, w, h);
      }
      this.cells.push({ pair, x: x + w / 2, y: y + h / 2, reach: Math.max(across / 2, down / 2, NEAR) });
    }
    return values.length ? { low, high } : undefined;
  }

  #names(context, rows, columns, left, top, cell) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("--soft");
    context.textBaseline = "middle";
    context.textAlign = "right";
    rows.forEach((name, at) => context.fillText(short(name), left - 6, top + (at + 0.5) * cell));
    context.textAlign = "left";
    columns.forEach((name, at) => {
      context.save();
      context.translate(left + (at + 0.5) * cell, top - 6);
      context.rotate(-Math.PI / 2);
      context.fillText(short(name), 0, 0);
      context.restore();
    });
  }

  #at(x, y) {
    let found, least = Infinity;
    for (const cell of x === undefined ? [] : this.cells) {
      const far = Math.max(Math.abs(cell.x - x), Math.abs(cell.y - y));
      if (far <= cell.reach && far < least) [found, least] = [cell.pair, far];
    }
    return found;
  }
}
