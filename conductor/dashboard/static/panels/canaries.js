// Models that are tried beside others, in a sentence each.
import { format, percent } from "../elements.js";

const failed = ({ errors, requests }) => (requests ? `${percent(errors / requests)} of ${format.format(requests)} failed` : "no requests");

export function canariesOf(cluster) {
  return (cluster?.canaries ?? []).filter((one) => one.state === "running").map(({ name, candidate, share, sides, verdict }) =>
    `Canary of ${name}: ${candidate} with ${share} %, ${failed(sides.candidate)}, before ${failed(sides.stable)}: ${verdict}`).join("; ");
}
