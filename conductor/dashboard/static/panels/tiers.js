// Blocks by tier.
import { element, format, percent, row, within } from "../elements.js";

export const TIER_COLUMNS = ["tier", "in use", "kept for later", "free", "capacity", "filled"];

// A row for each tier that the nodes have, summed over them.
export function tierRows(nodes) {
  const sums = new Map();
  for (const tier of nodes.flatMap((node) => node.tiers ?? [])) {
    const sum = sums.get(tier.name) ?? { used: 0, kept: 0, all: 0 };
    sum.used += tier.num_used_blocks ?? 0;
    sum.kept += tier.num_cached_blocks ?? 0;
    sum.all += tier.num_blocks ?? 0;
    sums.set(tier.name, sum);
  }
  return [...sums].map(([name, { used, kept, all }]) => {
    const meter = element("meter");
    Object.assign(meter, { max: all || 1, value: used + kept });
    meter.setAttribute("aria-label", `${name}: ${format.format(used + kept)} of ${format.format(all)} blocks`);
    return row(name, used, kept, Math.max(0, all - used - kept), all, within("td", "number", meter, ` ${percent((used + kept) / all)}`));
  });
}
