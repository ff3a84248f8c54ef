// The latest requests, filtered and searched; beside them the timeline of one.
import { outcomeOf } from "../cache_words.js";
import { cell, clock, element, json, pill, seconds, within } from "../elements.js";
import { timelineView } from "../panels/timeline.js";
import { Listing } from "./listing.js";

const CLASSES = { done: "good", running: "warn", cancelled: "soft" };
const number = (value) => cell(seconds(value), "number");

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
  const listing = new Listing(root, page, {
    name: "request", box: ".rows", panel: "#timeline", filters: { status: "#status" },
    label: "Table of requests", columns: columnsOf(page), key: (one) => one.id, none: none(),
  });
  let fetched = ""; // state of the request when its timeline was fetched

  async function showTimeline(id, state) {
    const path = `/v1/requests/${encodeURIComponent(id)}/timeline`;
    listing.panel.querySelector(".json").href = path;
    let parts, failed = false;
    try {
      parts = timelineView(await json(path));
    } catch (error) {
      failed = true;
      parts = [element("p", error.message, "bad")];
    }
    if (listing.id !== id || fetched !== state) return; // of another request, or of this one before it ended
    listing.content.replaceChildren(...parts);
    if (failed) fetched = ""; // it is read again with the next snapshot
  }

  function drawDetail(requests) {
    const changed = listing.open(), { id } = listing;
    const request = requests.find((one) => one.id === id), state = request ? `${request.status} ${request.output_tokens}` : "";
    if (changed) listing.content.replaceChildren();
    if (id && (changed || state !== fetched)) {
      fetched = state;
      showTimeline(id, state);
    }
  }

  function draw(frame) {
    if (page.live) drawDetail(frame.requests);
    listing.draw(frame.requests, (one, words) => isShown(one, words, page.param("status")), "of the latest");
  }

  return { draw, recolour() {}, unmount: () => listing.list.remove() };
}
