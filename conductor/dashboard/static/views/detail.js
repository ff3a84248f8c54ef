// The panel beside a list, for the one that is chosen in the page's address.

export class Detail {
  // ``closed()``: the panel was closed by its button or Escape.
  constructor(panel, closed) {
    Object.assign(this, { panel, title: panel.querySelector("h3"), content: panel.querySelector(".content"), id: "" });
    panel.querySelector(".close").onclick = closed;
    panel.onkeydown = (event) => { if (event.key === "Escape") closed(); };
  }

  // Show the panel of ``id``, or none if it is empty. Returns whether that changed.
  open(id) {
    const changed = id !== this.id;
    this.id = id;
    this.panel.hidden = !id;
    this.panel.parentElement.classList.toggle("open", id !== "");
    if (changed && id) {
      this.title.textContent = id;
      this.title.focus({ preventScroll: false });
    }
    return changed;
  }
}
