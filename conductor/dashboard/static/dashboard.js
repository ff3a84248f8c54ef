// The dashboard: reads a snapshot of the cluster from /v1/live once a second and draws it.
import { benchmarkView, verdictOf } from "./benchmarks.js";
import { byId, element, say, within } from "./elements.js";
import { draw } from "./panels.js";
import * as playground from "./playground.js";
import { startTheme } from "./theme.js";
import { timelineView } from "./timeline.js";

const RETRY_MS = 2000;
const LISTED_MS = 60000; // interval between checks for new benchmark results

let paused = false;

async function json(path) {
  const response = await fetch(path, { cache: "no-store" });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error?.message ?? response.statusText);
  return answer;
}

async function showTimeline(id) {
  const path = `/v1/requests/${encodeURIComponent(id)}/timeline`;
  const box = byId("timeline"), content = box.querySelector(".content");
  box.querySelector("h2").textContent = id;
  box.querySelector("a").href = path;
  try {
    content.replaceChildren(...timelineView(await json(path)));
  } catch (error) {
    content.replaceChildren(element("p", error.message, "bad"));
  }
  box.showModal();
}

function opener(id) {
  const open = element("button", "show");
  open.type = "button";
  open.dataset.request = id;
  open.setAttribute("aria-label", `timeline of ${id}`);
  return open;
}

async function openBenchmark(details) {
  if (details.querySelector("figure, p")) return;
  const box = within("div", "benchmark");
  details.append(box);
  try {
    const report = await json(`/v1/benchmarks/${encodeURIComponent(details.dataset.name)}`);
    box.append(element("p", verdictOf(report.rows)), ...benchmarkView(report));
  } catch (error) {
    box.append(element("p", error.message, "bad"));
  }
}

// Show files that are new or changed; open ones stay open.
async function listBenchmarks() {
  const box = byId("benchmarks").querySelector(".list");
  let listed = [];
  try {
    listed = (await json("/v1/benchmarks")).data;
  } catch { /* the status line already says that the conductor does not answer */ }
  const known = new Map([...box.children].map((details) => [details.dataset.version, details]));
  box.replaceChildren(...listed.map((one) => {
    const version = JSON.stringify(one);
    if (known.has(version)) return known.get(version);
    const told = one.problem ?? `${one.date.slice(0, 10)}, ${one.num_rows} figures, ${one.num_reached} of ${one.num_limits} limits reached`;
    const details = within("details", "card", within("summary", "", element("b", one.name), element("span", ` ${told}`, "soft")));
    Object.assign(details.dataset, { name: one.name, version });
    if (!one.problem) details.addEventListener("toggle", () => { if (details.open) openBenchmark(details); });
    return details;
  }));
  // Draw the latest result at once.
  const latest = listed.findIndex((one) => !one.problem);
  if (!known.size && latest >= 0) box.children[latest].open = true;
  byId("benchmarks").querySelector(".none").hidden = listed.length > 0;
}

// A session that is over is begun anew.
async function showSession() {
  const response = await fetch("/v1/session", { cache: "no-store" }).catch(() => undefined);
  if (response?.status === 401) location.assign("/sign-in");
  if (response?.ok) byId("session").hidden = !(await response.json()).signed_in;
}

function follow() {
  const source = new EventSource("/v1/live");
  source.onmessage = (event) => { if (!paused) draw(JSON.parse(event.data), opener); };
  source.onerror = () => {
    say(byId("state"), "the conductor does not answer");
    byId("state").className = "pill bad";
    source.close();
    setTimeout(follow, RETRY_MS);
    showSession();
  };
}

byId("pause").onclick = () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
};
byId("requests").addEventListener("click", (event) => {
  const asked = event.target.closest("[data-request]");
  if (asked) showTimeline(asked.dataset.request);
});
startTheme();
playground.start(showTimeline);
follow();
showSession();
listBenchmarks();
setInterval(() => { if (!document.hidden) listBenchmarks(); }, LISTED_MS);
