// Small things every part of the page is made of. Text goes in as text, never as HTML: node names, request ids and
// prompts come from outside.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);
export const format = new Intl.NumberFormat("en");

export function seconds(value) {
  if (!value) return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 2 : 1)} ms`;
  return `${value.toFixed(2)} s`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–");

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A table row; numbers stand right, nodes as they are.
export function row(...cells) {
  const made = element("tr");
  for (const cell of cells) {
    if (cell instanceof HTMLTableCellElement) { made.append(cell); continue; }
    const td = element("td");
    if (cell instanceof Node) td.append(cell);
    else td.textContent = typeof cell === "number" ? format.format(cell) : cell;
    if (typeof cell === "number") td.className = "number";
    made.append(td);
  }
  return made;
}

export function cell(text, className) { return element("td", text, className); }

export function pill(text, className) {
  const td = element("td", undefined, "status");
  td.append(element("span", text, className));
  return td;
}

// Put rows into a table's body; where there are none, the sentence beside it says so.
export function fill(table, rows) {
  table.tBodies[0].replaceChildren(...rows);
  rows[0]?.querySelectorAll("td").forEach((td, at) => table.tHead?.rows[0].cells[at]?.classList.toggle("number", td.classList.contains("number")));
  table.hidden = rows.length === 0;
  const none = table.parentElement.querySelector(".none");
  if (none) none.hidden = rows.length > 0;
}

// Horizontal bars, one a name: the longest is full.
export function bars(box, pairs, show = (value) => format.format(Math.round(value))) {
  const most = Math.max(...pairs.map(([, value]) => value), 1e-12);
  box.replaceChildren(...pairs.map(([name, value]) => {
    const line = element("div");
    const bar = element("i");
    bar.style.width = `${(100 * value) / most}%`;
    const track = element("span", undefined, "track");
    track.append(bar);
    line.append(element("span", name), track, element("b", show(value)));
    return line;
  }));
  if (!pairs.length) box.replaceChildren(element("p", "none yet", "soft"));
}
