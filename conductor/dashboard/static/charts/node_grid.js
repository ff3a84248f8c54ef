// Many nodes as a grid of squares, a block for each role: the colour is the state, its strength how full the pool is.
import { heldBy, stateClass } from "../nodes.js";
import { colour } from "../theme.js";
import { cleared, pointed } from "./canvas.js";

const LARGEST = 46, TITLE = 20, BETWEEN = 12;
const TONES = { good: "--accent", warn: "--warn", bad: "--bad" };

// The largest squares with which all blocks fit, one below the other.
function sizeFor(counts, width, height) {
  for (let size = LARGEST; size > 2; size -= 1) {
    const columns = Math.floor(width / size);
    const needed = counts.reduce((sum, count) => sum + TITLE + BETWEEN + size * Math.ceil(count / columns), 0);
    if (needed <= height) return size;
  }
  return 2;
}

export class NodeGrid {
  constructor(canvas, told, picked) {
    Object.assign(this, { canvas, squares: [] });
    pointed(canvas, (x, y) => told(this.#at(x, y)), (x, y) => picked(this.#at(x, y)));
  }

  // ``blocks``: the nodes of each role.
  draw(blocks) {
    const { context, width, height } = cleared(this.canvas);
    const size = sizeFor(blocks.map((nodes) => nodes.length), width, height), columns = Math.max(1, Math.floor(width / size));
    this.squares = [];
    context.font = "12px system-ui, sans-serif";
    let top = 0;
    for (const nodes of blocks) {
      context.globalAlpha = 1;
      context.fillStyle = colour("--soft");
      context.fillText(`${nodes[0].role} (${nodes.length})`, 0, top + 13);
      top += TITLE;
      nodes.forEach((node, at) => {
        const x = (at % columns) * size, y = top + Math.floor(at / columns) * size;
        const pool = node.tiers?.find((tier) => tier.name === "pool"), state = stateClass(node);
        const share = pool?.num_blocks ? Math.min(1, heldBy(pool) / pool.num_blocks) : 0;
        context.globalAlpha = state === "good" ? 0.2 + 0.8 * share : 1;
        context.fillStyle = colour(TONES[state]);
        context.fillRect(x, y, size - (size > 5 ? 2 : 1), size - (size > 5 ? 2 : 1));
        this.squares.push({ node, x, y, size });
      });
      top += Math.ceil(nodes.length / columns) * size + BETWEEN;
    }
    context.globalAlpha = 1;
  }

  #at(x, y) {
    return this.squares.find((one) => x >= one.x && x < one.x + one.size && y >= one.y && y < one.y + one.size)?.node;
  }
}
