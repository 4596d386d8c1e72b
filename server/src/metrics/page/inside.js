// What the page draws of segments, prefixes and reads, from what the server tells. Nothing here touches the page.
import { size, count } from "/figures.js";

const COLUMNS = 64;
const CELL = 10;
const GAP = 2;

// Each shard: its name, what it holds in words, and boxes of cells: a frame, and parts stacked from its foot.
export function mapOf({ columns, shards, segment_bytes: bytes }) {
  return shards.map(({ shard, cells }) => {
    const of = (cell, name) => cell[columns.indexOf(name)];
    const sum = (name) => cells.reduce((total, cell) => total + of(cell, name), 0);
    const boxes = [];
    cells.forEach((cell, at) => {
      const [x, y] = [(at % COLUMNS) * (CELL + GAP), Math.floor(at / COLUMNS) * (CELL + GAP)];
      const whole = Math.max(1, of(cell, "segments") * bytes);
      let foot = y + CELL;
      const stacked = [["other", "overhead"], ["live", "live"], ["dead", "dead"]].map(([kind, name]) => {
        const height = Math.min(foot - y, (of(cell, name) / whole) * CELL);
        foot -= height;
        return { class: kind, x, y: foot, width: CELL, height };
      });
      boxes.push(...stacked, { class: of(cell, "lost") > 0 ? "frame lost" : "frame", x, y, width: CELL, height: CELL });
    });
    const rows = Math.max(1, Math.ceil(cells.length / COLUMNS));
    const lost = sum("lost") > 0 ? `, ${count(sum("lost"))} lost` : "";
    return {
      name: `Shard ${shard}`,
      said: `${count(sum("segments"))} segments, ${size(sum("live"))} live, ${size(sum("dead"))} dead, ${size(sum("free"))} free${lost}`,
      width: COLUMNS * (CELL + GAP),
      height: rows * (CELL + GAP),
      boxes,
    };
  });
}

const short = (key) => key.slice(0, 16);
const told = (ms) => (ms === null ? "none" : ms < 10 ? `${ms.toFixed(2)} ms` : `${ms.toFixed(0)} ms`);

// Rows of the tree, each with the last read that began at its first block.
export function branchesOf({ branches, namespace }, reads, tokens) {
  return branches.map(({ depth, first, blocks, forks }) => {
    const read = reads.find((one) => one.first === first && one.namespace === namespace) ?? null;
    const name = `${"  ".repeat(Math.min(depth, 16))}${short(first)}`;
    const last = read ? `${read.path}, ${told(read.last)}` : "none";
    return { cells: [name, count(blocks), count(blocks * tokens), forks ? count(forks) : "none", last], read };
  });
}

export function readsOf({ reads }) {
  return reads.map((one) => {
    const known = one.layers_ms.filter((ms) => ms !== null);
    const [first, last] = [Math.min(...known), Math.max(...known)];
    const began = new Date(one.began_ms).toLocaleTimeString();
    return {
      ...one, last,
      said: `${one.path}, ${one.model}, ${count(one.blocks)} blocks, began ${began}`,
      cells: [began, one.path, one.model, short(one.first), count(one.blocks), told(first), told(last), one.code],
    };
  });
}

// A bar for each layer: how long after the read's beginning it had come.
export function layersOf({ layers_ms: layers, last }) {
  return layers.map((ms, at) => ({ name: `Layer ${at}`, ms: told(ms), part: ms === null || !(last > 0) ? 0 : ms / last }));
}
