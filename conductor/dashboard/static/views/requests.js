// The latest requests, filtered and searched; beside them the timeline of one.
import { outcomeOf } from "../cache_words.js";
import { cell, element, format, json, pill, say, seconds, within } from "../elements.js";
import { List } from "../list.js";
import { timelineView } from "../panels/timeline.js";
import { Detail } from "./detail.js";

const CLASSES = { done: "good", running: "warn", cancelled: "soft" };
const number = (value) => cell(seconds(value), "number");
const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString([], { hour12: false });

function columnsOf(page) {
  const link = (request) => {
    const href = page.timelineHref(request.id);
    const made = element(href ? "a" : "span", request.id);
    if (href) made.href = href;
    return within("th", "id", made);
  };
  return [
    { title: "request", width: 190, cell: link, by: (one) => one.id },
    { title: "received", width: 82, cell: (one) => cell(clock(one.received_unix_s), "soft"), by: (one) => one.received_unix_s },
    { title: "status", width: 108, cell: (one) => pill(one.status, CLASSES[one.status] ?? "bad"), by: (one) => one.status },
    { title: "first token", width: 94, cell: (one) => number(one.ttft_s), by: (one) => one.ttft_s },
    { title: "whole", width: 82, cell: (one) => number(one.e2e_s), by: (one) => one.e2e_s },
    { title: "a token", width: 82, cell: (one) => number(one.tpot_s), by: (one) => one.tpot_s },
    { title: "prompt", width: 74, cell: (one) => one.prompt_tokens, by: (one) => one.prompt_tokens },
    { title: "cached", width: 74, cell: (one) => one.cached_tokens, by: (one) => one.cached_tokens },
    { title: "output", width: 70, cell: (one) => one.output_tokens, by: (one) => one.output_tokens },
    { title: "prefix", width: 260, cell: outcomeOf, by: outcomeOf },
    { title: "tenant", width: 90, cell: (one) => one.tenant || "–", by: (one) => one.tenant },
  ];
}

function isShown(request, words, status) {
  const failed = !(request.status in CLASSES);
  if (status && (status === "failed" ? !failed : request.status !== status)) return false;
  const text = [request.id, request.client_id, request.tenant, request.status, request.endpoint, outcomeOf(request)].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

const none = () => {
  const link = element("a", "playground");
  link.href = "#/playground";
  return ["No request here. Send one from the ", link, ", or to ", element("code", "/v1/completions"), " or ", element("code", "/v1/chat/completions"), "."];
};

export function mount(root, page) {
  const search = root.querySelector("[type=search]"), status = root.querySelector("#status");
  const list = new List(root.querySelector(".rows"), {
    label: "Table of requests", columns: columnsOf(page), key: (one) => one.id, none: none(), live: page.live,
    sorted: (sort) => page.change({ sort }), picked: page.live ? (request) => page.change({ request }, true) : undefined,
  });
  const panel = root.querySelector("#timeline");
  if (!page.live) panel.remove();
  const detail = page.live && new Detail(panel, () => {
    const { id } = detail;
    page.change({ request: "" }, true);
    list.focus(id);
  });
  let fetched = ""; // state of the request when its timeline was fetched
  if (page.live) {
    search.oninput = () => page.change({ q: search.value });
    status.onchange = () => page.change({ status: status.value });
  }

  async function showTimeline(id) {
    const path = `/v1/requests/${encodeURIComponent(id)}/timeline`;
    panel.querySelector(".json").href = path;
    let parts;
    try {
      parts = timelineView(await json(path));
    } catch (error) {
      parts = [element("p", error.message, "bad")];
    }
    if (detail.id === id) detail.content.replaceChildren(...parts);
  }

  function drawDetail(requests) {
    const id = page.param("request"), changed = detail.open(id);
    const request = requests.find((one) => one.id === id), state = request ? `${request.status} ${request.output_tokens}` : "";
    if (changed) detail.content.replaceChildren();
    if (id && (changed || state !== fetched)) showTimeline(id);
    fetched = state;
  }

  function draw(frame) {
    const words = page.param("q").toLowerCase().split(/\s+/).filter(Boolean);
    const shown = frame.requests.filter((one) => isShown(one, words, page.param("status")));
    if (page.live) {
      if (document.activeElement !== search) search.value = page.param("q");
      status.value = page.param("status");
      drawDetail(frame.requests);
      say(root.querySelector(".count"), `${format.format(shown.length)} of the latest ${format.format(frame.requests.length)}`);
    }
    list.sortBy(page.param("sort"));
    list.draw(shown, page.param("request"));
  }

  return { draw, recolour() {}, unmount: () => list.remove() };
}
