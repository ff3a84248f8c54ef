// The line at the top: the model, and whether the cluster serves.
import { byId, element, patch, say } from "./elements.js";

function tell(text, className) {
  say(byId("state"), text);
  byId("state").className = `pill ${className}`;
}

export function drawState(now) {
  const degraded = now.degraded ?? []; // a tenant is not told
  const state = !now.ready ? "not ready" : degraded.length ? "degraded" : "ready";
  if (now.tenant !== undefined) document.body.dataset.tenant = now.tenant;
  const { model, models = [] } = now.cluster ?? now;
  say(byId("model"), models.length > 1 ? `figures of ${model}, nodes of all ${models.length} models` : model);
  tell(state, { ready: "good", degraded: "warn" }[state] ?? "bad");
  patch(byId("degraded"), degraded.map((text) => element("li", text)));
}

export const lost = () => tell("the conductor does not answer", "bad");
