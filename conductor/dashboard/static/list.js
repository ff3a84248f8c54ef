// A long table that scrolls inside itself, sorted by its headings. Only the rows in sight are elements.
import { element, patch, row, within } from "./elements.js";

const HEIGHT = 34; // of a row, pixels: as in panels.css
const BEYOND = 6; // rows drawn above and below those in sight

export class List {
  // ``columns``: [{title, width, cell(item), by(item)}]; ``width`` in pixels, ``by`` what it is sorted by.
  // ``key(item)``: a name of its own. ``none``: what an empty list says. ``live``: false in a report, which has all rows.
  constructor(box, { label, columns, key, none, live, sort = "", sorted = () => {}, picked }) {
    Object.assign(this, { columns, key, live, sort, sorted, picked, items: [], chosen: "" });
    this.table = element("table", undefined, "list");
    const widths = columns.map(({ width }) => { const made = element("col"); made.style.width = `${width}px`; return made; });
    this.body = element("tbody");
    this.above = within("tbody", "space", within("tr", "", element("td")));
    this.below = this.above.cloneNode(true);
    for (const space of [this.above, this.below]) space.setAttribute("aria-hidden", "true");
    this.head = within("tr", "", ...columns.map((column, at) => this.#heading(column, at)));
    this.widths = within("colgroup", "", ...widths);
    this.table.append(this.widths, within("thead", "", this.head), this.body);
    this.#setWidth();
    this.none = element("p", undefined, "none");
    this.none.append(...none);
    this.scroller = within("div", "scroll plain", this.table, this.none);
    Object.assign(this.scroller, { tabIndex: 0, onscroll: () => this.#render() });
    this.scroller.setAttribute("role", "region");
    this.scroller.setAttribute("aria-label", label);
    if (picked) this.body.onclick = (event) => {
      const key = event.target.closest("tr")?.dataset.key;
      if (key && !event.target.closest("a")) picked(key);
    };
    box.append(this.scroller);
    this.observer = new ResizeObserver(() => this.#render());
    this.observer.observe(this.scroller);
    this.#markSort();
  }

  draw(items, chosen = "") {
    Object.assign(this, { items, chosen });
    this.table.hidden = items.length === 0;
    this.none.hidden = items.length > 0;
    this.#order();
    this.#render();
  }

  // One more column, the last one. Draw the list afterwards.
  add(column) {
    const width = element("col");
    width.style.width = `${column.width}px`;
    this.columns.push(column);
    this.widths.append(width);
    this.head.append(this.#heading(column, this.columns.length - 1));
    this.#setWidth();
  }

  // Set the focus on a row's link, if the row is in sight.
  focus(key) { this.body.querySelector(`tr[data-key="${CSS.escape(key)}"] a`)?.focus(); }

  sortBy(sort) {
    if (sort === this.sort) return;
    this.sort = sort;
    this.#markSort();
  }

  remove() { this.observer.disconnect(); }

  #setWidth() { this.table.style.minWidth = `${this.columns.reduce((sum, { width }) => sum + width, 0)}px`; }

  #heading(column, at) {
    const made = element("th", column.by && this.live ? undefined : column.title);
    made.scope = "col";
    if (column.by && this.live) {
      const sort = element("button", column.title);
      sort.type = "button";
      sort.onclick = () => this.sorted(this.sort === `-${at}` ? `${at}` : this.sort === `${at}` ? "" : `-${at}`);
      made.append(sort);
    }
    return made;
  }

  #markSort() {
    const order = this.sort.startsWith("-") ? "descending" : "ascending", at = Number(this.sort.replace("-", "") || NaN);
    [...this.head.cells].forEach((cell, number) => {
      if (number === at) cell.setAttribute("aria-sort", order);
      else cell.removeAttribute("aria-sort");
    });
  }

  #order() {
    const by = this.columns[Number(this.sort.replace("-", "") || NaN)]?.by;
    if (!by) return;
    const sign = this.sort.startsWith("-") ? -1 : 1;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    this.items = this.items.map((item) => [by(item), item]).sort(([a], [b]) => sign * compare(a, b)).map(([, item]) => item);
  }

  #render() {
    const tall = this.scroller.clientHeight || 600;
    const first = this.live ? Math.max(0, Math.floor(this.scroller.scrollTop / HEIGHT) - BEYOND) : 0;
    const after = this.live ? Math.min(this.items.length, first + Math.ceil(tall / HEIGHT) + 2 * BEYOND) : this.items.length;
    this.#space(this.above, first, () => this.body.before(this.above));
    this.#space(this.below, this.items.length - after, () => this.body.after(this.below));
    const focused = this.body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.key : undefined;
    const rows = this.items.slice(first, after).map((item) => this.#row(item));
    patch(this.body, rows);
    const numbers = rows[0] && [...rows[0].cells].map((cell) => cell.classList.contains("number"));
    numbers?.forEach((number, at) => this.head.cells[at].classList.toggle("number", number));
    // Rows move: keep keyboard focus on the same one.
    if (focused !== undefined && document.activeElement?.closest?.("tr")?.dataset.key !== focused) this.focus(focused);
  }

  #space(space, rows, add) {
    space.rows[0].cells[0].style.height = `${rows * HEIGHT}px`;
    if (!rows) space.remove();
    else if (!space.parentNode) add();
  }

  #row(item) {
    const made = row(...this.columns.map((column) => column.cell(item))), key = this.key(item);
    made.dataset.key = key;
    if (key === this.chosen) made.setAttribute("aria-current", "true");
    for (const cell of made.cells) if (!cell.title && cell.textContent.length > 12) cell.title = cell.textContent;
    return made;
  }
}
