// Colours: as the system has them, light, or dark. Paper is light.
import { redraw } from "./charts.js";
import { byId } from "./draw.js";

const NAMES = ["auto", "light", "dark"];

// A file that was opened from a disk may have nowhere to remember it.
function remembered() {
  try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
}

function remember(name) {
  try { localStorage.setItem("theme", name); } catch { /* then not */ }
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
