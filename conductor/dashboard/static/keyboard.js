// Keys: views by number, search, pause, help.
import { byId } from "./elements.js";

const TYPING = "input, textarea, select, [contenteditable]";
const PRESSED = `${TYPING}, button, summary`; // space is theirs

function search(go) {
  const found = () => document.querySelector(".view [type=search]");
  if (!found()) {
    go("requests");
    addEventListener("popstate", () => found()?.focus(), { once: true });
  }
  found()?.focus();
  found()?.select();
}

export function startKeyboard(views, { isForbidden, go, togglePause, close }) {
  byId("help").onclick = () => byId("keys").showModal();
  addEventListener("keydown", (event) => {
    const target = event.target instanceof Element ? event.target : document.body;
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    if (event.key === "Escape" && !event.defaultPrevented) {
      if (target.matches("[type=search]")) target.blur();
      else if (document.querySelector(".detail:not([hidden])")) close();
    }
    if (target.closest(TYPING)) return;
    const view = views[Number(event.key) - 1];
    if (view && !isForbidden(view)) go(view);
    else if (event.key === "/") search(go);
    else if (event.key === "?") byId("keys").showModal();
    else if (event.key === " " && !target.closest(PRESSED)) togglePause();
    else return;
    event.preventDefault();
  });
}
