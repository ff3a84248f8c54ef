// The dashboard: reads a snapshot of the cluster from /v1/live once a second; the view of the address draws it.
import * as address from "./address.js";
import { byId, fromTemplate, within } from "./elements.js";
import { arrived, forget } from "./frames.js";
import { record } from "./history.js";
import { startKeyboard } from "./keyboard.js";
import { askForRequests, followRunning } from "./requests.js";
import { drawState, lost } from "./state.js";
import { startTheme } from "./theme.js";
import * as benchmarks from "./views/benchmarks.js";
import * as cache from "./views/cache.js";
import * as cluster from "./views/cluster.js";
import * as fleet from "./views/fleet.js";
import * as latency from "./views/latency.js";
import * as playground from "./views/playground.js";
import * as requests from "./views/requests.js";
import * as transfers from "./views/transfers.js";
import * as usage from "./views/usage.js";

const RETRY_MS = 2000;
const RANGE_S = 300;
const VIEWS = { cluster, cache, transfers, requests, latency, fleet, usage, benchmarks, playground };

const main = byId("main"), links = [...document.querySelectorAll("[data-view]")];
let frame; // what is shown
let latest; // what came last: newer than ``frame`` while paused
let name = "", mounted;

const param = (key) => address.read().params.get(key) ?? "";
const isPaused = () => param("paused") !== "";
const isForbidden = (view) => frame?.isWhole === false && "whole" in links.find((link) => link.dataset.view === view).dataset;

// What views know of the page.
const page = {
  live: true,
  param,
  range: () => Number(param("range")) || RANGE_S,
  change: (values, step) => address.change(name, values, step),
  go: (view, values) => { location.hash = address.href(view, values); },
  // The address of the current view with other values.
  with: (values) => address.href(name, { ...Object.fromEntries(address.read().params), ...values }),
  timelineHref: (request) => (name === "requests" ? page.with({ request }) : address.href("requests", { request })),
};

function open(view) {
  mounted?.unmount();
  main.querySelector(".view")?.remove();
  const root = within("div", "view", fromTemplate(`view-${view}`, true));
  root.id = view;
  root.querySelector("h2").id = "view-title";
  const moved = name !== "";
  name = view;
  main.append(root);
  mounted = VIEWS[view].mount(root, page);
  document.title = `${root.querySelector("h2").textContent} · Moonpool`;
  main.scrollTop = 0;
  // On a phone the names of the views are one line, wider than the screen.
  const link = document.querySelector(`nav [data-view=${view}]`);
  link.parentElement.scrollLeft = link.offsetLeft - link.parentElement.clientWidth / 2;
  if (moved) main.focus({ preventScroll: true });
}

// Show what the address says.
function show() {
  const { view } = address.read(), fallback = frame?.isWhole === false ? "requests" : "cluster";
  const wanted = Object.hasOwn(VIEWS, view) && !isForbidden(view) ? view : fallback;
  if (wanted !== name) open(wanted);
  else mounted.changed?.();
  for (const link of links) {
    link.href = address.href(link.dataset.view);
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("range").value = String(page.range());
  byId("pause").setAttribute("aria-pressed", isPaused());
  if (!isPaused() && latest) frame = latest;
  if (frame) mounted.draw(frame);
}

// Take in a snapshot, and draw it unless the page is paused; the line at the top is always that of now.
export function take(now) {
  latest = arrived(now);
  record(latest);
  if (!document.hidden) followRunning(latest.requests, now.requests);
  drawState(now);
  if (isPaused() && frame) return;
  const first = !frame;
  frame = latest;
  if (first) show();
  else if (!document.hidden) mounted.draw(frame);
}

// A session that is over is begun anew.
async function showSession() {
  const response = await fetch("/v1/session", { cache: "no-store" }).catch(() => undefined);
  if (response?.status === 401) location.assign("/sign-in");
  if (response?.ok) byId("session").hidden = !(await response.json()).signed_in;
}

function follow() {
  const source = new EventSource("/v1/live");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => {
    lost();
    forget();
    source.close();
    setTimeout(follow, RETRY_MS);
    showSession();
  };
  askForRequests();
}

const togglePause = () => page.change({ paused: isPaused() ? "" : "1" });
byId("pause").onclick = togglePause;
byId("range").onchange = () => page.change({ range: Number(byId("range").value) === RANGE_S ? "" : byId("range").value });
document.querySelector(".skip").onclick = (event) => { event.preventDefault(); main.focus(); };
document.addEventListener("visibilitychange", () => { if (!document.hidden) show(); });
startKeyboard(Object.keys(VIEWS), { isForbidden, go: page.go, togglePause, close: () => page.change({ request: "", node: "" }, true) });
address.follow(show);
show();
startTheme(() => mounted.recolour());
follow();
showSession();
