// Colour theme: the system's, light or dark. Print is light.
import { byId } from "./elements.js";

const NAMES = ["auto", "light", "dark"];

const resolved = new Map(); // colours of the current theme, for canvases

// The colour of a CSS variable such as --accent, as canvases take it.
export function colour(name) {
  if (!resolved.has(name)) {
    // light-dark() resolves only on an element.
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name);
}

// localStorage may be unavailable, e.g. for a page opened from disk.
function remembered() {
  try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
}

function remember(name) {
  try { localStorage.setItem("theme", name); } catch { /* the choice lasts for this page only */ }
}

// ``redraw()``: draw canvases again, with other colours.
export function startTheme(redraw) {
  const button = byId("theme"), root = document.documentElement;
  let chosen = remembered();
  const show = (name) => {
    root.style.colorScheme = name;
    resolved.clear();
    redraw();
  };
  const apply = () => {
    button.querySelector("span").textContent = chosen;
    show(chosen === "auto" ? "light dark" : chosen);
  };
  apply();
  button.onclick = () => {
    chosen = NAMES[(NAMES.indexOf(chosen) + 1) % NAMES.length];
    remember(chosen);
    apply();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  addEventListener("beforeprint", () => show("light"));
  addEventListener("afterprint", apply);
}
