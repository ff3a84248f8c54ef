// The list of a view, searched and filtered by the page's address, and beside it the panel of the one that is chosen there.
import { format, say } from "../elements.js";
import { List } from "../list.js";

export class Listing {
  // In ``root``: ``box`` of the list, ``panel``, and ``filters``: selects by their names in the address, where ``name`` is the
  // chosen one's. ``options``: of ``List``.
  constructor(root, page, { name, box, panel, filters, ...options }) {
    const aside = root.querySelector(panel), search = root.querySelector("[type=search]");
    const choose = (key) => page.change({ [name]: key }, true);
    const close = () => {
      const { id } = this;
      choose("");
      this.list.focus(id);
    };
    this.list = new List(root.querySelector(box), { ...options, live: page.live, sorted: (sort) => page.change({ sort }), picked: page.live ? choose : undefined });
    Object.assign(this, { page, name, search, panel: aside, id: "", count: root.querySelector(".count"), content: aside.querySelector(".content") });
    this.inputs = Object.entries({ q: "[type=search]", ...filters }).map(([key, selector]) => [key, root.querySelector(selector)]);
    if (!page.live) { aside.remove(); return; }
    for (const [key, input] of this.inputs) input.oninput = () => page.change({ [key]: input.value });
    aside.querySelector(".close").onclick = close;
    aside.onkeydown = (event) => { if (event.key === "Escape") close(); };
  }

  // Draw the items for which ``isShown(item, words)``; ``of``: between their number and that of all.
  draw(items, isShown, of = "of") {
    const { page, name } = this, words = page.param("q").toLowerCase().split(/\s+/).filter(Boolean);
    const shown = items.filter((item) => isShown(item, words));
    if (page.live) {
      for (const [key, input] of this.inputs) if (input !== this.search || document.activeElement !== input) input.value = page.param(key);
      say(this.count, `${format.format(shown.length)} ${of} ${format.format(items.length)}`);
    }
    this.list.sortBy(page.param("sort"));
    this.list.draw(shown, page.param(name));
  }

  // Show the panel of the chosen one, or none. Returns whether that changed.
  open() {
    const id = this.page.param(this.name), changed = id !== this.id, title = this.panel.querySelector("h3");
    this.id = id;
    this.panel.hidden = !id;
    this.panel.parentElement.classList.toggle("open", id !== "");
    if (changed && id) {
      title.textContent = id;
      title.focus({ preventScroll: false });
    }
    return changed;
  }
}
