// Building blocks of the page. Text is inserted as text, never as HTML: node names, request ids and prompts are
// untrusted.

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

export const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString([], { hour12: false });

export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–");

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Create an element with children (nodes or strings).
export function within(name, className, ...children) {
  const made = element(name, undefined, className);
  made.append(...children);
  return made;
}

// A container that scrolls horizontally, by keyboard too.
export function scrolling(label, ...children) {
  const made = within("div", "scroll", ...children);
  made.tabIndex = 0;
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", label);
  return made;
}

export function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export async function json(path) {
  const response = await fetch(path, { cache: "no-store" });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error?.message ?? response.statusText);
  return answer;
}

// Set a text only if it changed, so that screen readers announce it only then.
export function say(target, text) { if (target.textContent !== text) target.textContent = text; }

// Replace the children. Equal ones stay in place and keep focus, selection and scroll position.
export function patch(parent, children) {
  children.forEach((child, at) => {
    const known = parent.childNodes[at];
    if (!known) parent.append(child);
    else if (known !== child && !known.isEqualNode(child)) known.replaceWith(child);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

// A table row: the first cell is its header, numbers are right-aligned, nodes are inserted unchanged.
export function row(...cells) {
  const made = element("tr");
  cells.forEach((cell, at) => {
    if (cell instanceof HTMLTableCellElement) { made.append(cell); return; }
    const td = element(at ? "td" : "th");
    if (!at) td.scope = "row";
    if (cell instanceof Node) td.append(cell);
    else td.textContent = typeof cell === "number" ? format.format(cell) : cell;
    if (typeof cell === "number") td.className = "number";
    made.append(td);
  });
  return made;
}

export function cell(text, className) { return element("td", text, className); }

export function pill(text, className) { return within("td", "status", element("span", text, className)); }

function addHead(made, columns) {
  const head = within("tr", "", ...columns.map((column) => element("th", column)));
  for (const th of head.cells) th.scope = "col";
  made.append(within("thead", "", head), element("tbody"));
}

// A table; ``columns`` are headings, ``rows`` come from ``row``.
export function table(columns, rows) {
  const made = element("table");
  addHead(made, columns);
  fill(made, rows);
  return made;
}

// The content of a template; its tables name their columns in an attribute. ``live``: the page, not a report.
export function fromTemplate(id, live) {
  const made = byId(id).content.cloneNode(true);
  if (!live) made.querySelectorAll("[data-only=live]").forEach((part) => part.remove());
  for (const one of made.querySelectorAll("table[data-columns]")) addHead(one, one.dataset.columns.split("|"));
  return made;
}

// Set a table's rows; without rows, show the sentence beside it.
export function fill(target, rows) {
  const first = rows[0] && [...rows[0].cells].map((one) => one.classList.contains("number"));
  patch(target.tBodies[0], rows);
  first?.forEach((number, at) => target.tHead?.rows[0].cells[at]?.classList.toggle("number", number));
  target.hidden = rows.length === 0;
  const none = target.parentElement?.querySelector(".none");
  if (none) none.hidden = rows.length > 0;
}

// Horizontal bars, one per name; the longest fills the width.
export function bars(box, pairs, show = (value) => format.format(Math.round(value)), most = 0) {
  const full = Math.max(most, ...pairs.map(([, value]) => value), 1e-12);
  patch(box, pairs.length ? pairs.map(([name, value]) => {
    const bar = element("i");
    bar.style.width = `${(100 * value) / full}%`;
    return within("div", "", element("span", name), within("span", "track", bar), element("b", show(value)));
  }) : [element("p", "none yet", "soft")]);
}
