// The page's state in its address: #/VIEW?name=value. Views, requests and nodes are steps to go back over; filters are not.

const KEPT = ["range", "paused"]; // names that stay when the view changes

let listener = () => {};

export function read() {
  const [path, query = ""] = location.hash.startsWith("#/") ? location.hash.slice(2).split("?") : [""];
  return { view: path, params: new URLSearchParams(query) };
}

export function href(view, values = {}) {
  const { params } = read(), made = new URLSearchParams();
  for (const name of KEPT) if (params.has(name)) made.set(name, params.get(name));
  for (const [name, value] of Object.entries(values)) if (value) made.set(name, value);
  const query = made.toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

// Change names of the current view; an empty value removes its name. ``step``: Back undoes it.
export function change(view, values, step = false) {
  const { params } = read();
  for (const [name, value] of Object.entries(values)) {
    if (value) params.set(name, value);
    else params.delete(name);
  }
  const query = params.toString(), hash = `#/${view}${query ? `?${query}` : ""}`;
  if (hash === location.hash) return;
  history[step ? "pushState" : "replaceState"](null, "", hash);
  listener();
}

export function follow(changed) {
  listener = changed;
  addEventListener("popstate", changed); // links and Back
}
