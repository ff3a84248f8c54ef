// Colour theme: the system's, light or dark. Print is light.
import { redraw } from "./charts.js";
import { byId } from "./elements.js";

const NAMES = ["auto", "light", "dark"];

// localStorage may be unavailable, e.g. for a page opened from disk.
function remembered() {
  try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
}

function remember(name) {
  try { localStorage.setItem("theme", name); } catch { /* the choice lasts for this page only */ }
}

export function startTheme() {
  const button = byId("theme"), root = document.documentElement;
  let chosen = remembered();
  const apply = (name) => {
    root.style.colorScheme = name === "auto" ? "light dark" : name;
    button.querySelector("span").textContent = name;
  };
  apply(chosen);
  button.onclick = () => {
    chosen = NAMES[(NAMES.indexOf(chosen) + 1) % NAMES.length];
    remember(chosen);
    apply(chosen);
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { root.style.colorScheme = "light"; redraw(); });
  addEventListener("afterprint", () => { apply(chosen); redraw(); });
}
