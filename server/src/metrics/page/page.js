// Puts the figures on the page. Names come from clients: they are set as text, never as markup.
import { parse, figures, past, size, count, percent, time, span, model } from "/figures.js";
import { mapOf, branchesOf, readsOf, layersOf } from "/inside.js";

const find = (id) => document.getElementById(id);
const TIMEOUT_MS = 10_000;
const HISTORY_SECONDS = 3600;
const EVENTS_MAX = 50;
const ROWS_MAX = 50;
const MAP_SECONDS = 15;
let before = null;
let mapped = -Infinity;
let history = [];
let waiting = null;
let looking = false;

// An element is changed only where its text differs, so that a screen reader and a selection stay where they are.
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fit(parent, length, make) {
  while (parent.children.length > length) parent.lastElementChild.remove();
  while (parent.children.length < length) parent.append(make());
}

function element(name, ...children) {
  const one = document.createElement(name);
  one.append(...children);
  return one;
}

function table(id, columns, rows) {
  const all = find(id);
  all.parentElement.hidden = rows.length === 0;
  if (!all.tHead) {
    const cells = columns.map((column) => element("th", column));
    cells.forEach((cell) => (cell.scope = "col"));
    all.append(element("thead", element("tr", ...cells)), element("tbody"));
  }
  const body = all.tBodies[0];
  fit(body, Math.min(rows.length, ROWS_MAX), () => {
    const name = element("th");
    name.scope = "row";
    return element("tr", name, ...columns.slice(1).map(() => element("td")));
  });
  [...body.rows].forEach((row, at) => [...row.cells].forEach((cell, column) => say(cell, rows[at][column])));
}

function tiles(all) {
  const list = find("head");
  fit(list, all.length, () => element("div", element("dt"), element("dd", element("strong"), element("span"))));
  all.forEach(([name, value, more], at) => {
    const [term, description] = list.children[at].children;
    say(term, name);
    say(description.children[0], value);
    say(description.children[1], more);
  });
}

const SVG = "http://www.w3.org/2000/svg";

const amount = (value) => `${size(value)}/s`;
// What is plotted: its name, its value, how that is written, the least height of the plot, and its name in the past.
const PLOTS = [
  ["Hit ratio", (seen) => seen.hits.rate, percent, 1, "rate"],
  ["Read by clients", (seen) => seen.calls.reduce((total, call) => total + call.out, 0), amount, 0, "out"],
  ["Put by clients", (seen) => seen.calls.reduce((total, call) => total + call.into, 0), amount, 0, "into"],
  ["Live bytes on disk", (seen) => seen.disk.live, size, 0, "live"],
];

function plots() {
  const place = find("plots");
  fit(place, PLOTS.length, () => {
    const drawing = document.createElementNS(SVG, "svg");
    drawing.setAttribute("viewBox", "0 0 100 100");
    drawing.setAttribute("preserveAspectRatio", "none");
    drawing.setAttribute("aria-hidden", "true");
    drawing.append(document.createElementNS(SVG, "path"));
    return element("figure", drawing, element("figcaption"));
  });
  const first = history[0]?.at ?? 0;
  const span = Math.max(1, (history.at(-1)?.at ?? 0) - first);
  PLOTS.forEach(([name, , shown, top], at) => {
    const known = history.map((one) => one.values[at]).filter((value) => value !== null);
    const highest = known.length ? Math.max(...known) : null;
    const most = Math.max(top, highest ?? 0) || 1;
    // Where there is no value the line ends; a value between two of those is a point.
    let line = "";
    history.forEach((one, n) => {
      if (one.values[at] === null) return;
      const place = `${(((one.at - first) / span) * 100).toFixed(2)} ${(98 - (one.values[at] / most) * 96).toFixed(2)}`;
      line += n && history[n - 1].values[at] !== null ? `L${place}` : `M${place}h0`;
    });
    const [drawing, caption] = place.children[at].children;
    drawing.firstElementChild.setAttribute("d", line);
    const last = history.at(-1)?.values[at] ?? null;
    const told = (value) => (value === null ? "none" : shown(value));
    say(caption, `${name}: ${told(last)} now, ${told(highest)} at most`);
  });
}

function show(seen, ever) {
  const { disk, requests, hits } = seen;
  say(find("version"), seen.version);
  const known = [seen.store && `store ${seen.store}`, `from ${location.host}`, seen.uptime !== null && `running for ${span(seen.uptime)}`];
  say(find("which"), known.filter(Boolean).join(", "));
  document.title = `Kvarts ${location.host} ${seen.store.slice(0, 8)}`.trim();
  let state = "Well";
  if (seen.failingShards > 0) state = `${seen.failingShards} shards refuse puts: their device fails writes`;
  if (seen.deadExecutors > 0) state = `${seen.deadExecutors} executors have died: restart the server`;
  if (seen.readOnly !== null) state = `Read-only: ${seen.readOnly}`;
  say(find("state"), state);
  find("state").classList.toggle("bad", state !== "Well");
  say(find("period"), seen.seconds > 0 ? `In the last ${Math.max(1, Math.round(seen.seconds))} s` : "Since the server's start");
  const misses = seen.misses.slice(0, 4).map(([reason, blocks]) => `${count(blocks)} ${reason}`).join(", ");
  tiles([
    ["Hit ratio of lookups", hits.asked > 0 ? percent(hits.rate) : "no lookups", `${count(hits.found)} of ${count(hits.asked)} blocks found`],
    ["Blocks of reads", `${count(seen.delivered)} delivered`, misses ? `missed: ${misses}` : "none missed"],
    ["Disk", `${size(disk.live)} live`, `${size(disk.dead)} dead, ${size(disk.free)} free of ${size(disk.budget)}; ${count(disk.blocks)} blocks`],
    ["Devices", `${size(disk.read)}/s read`, `${size(disk.written)}/s written; ${count(disk.running)} operations under way, ${count(disk.waiting)} waiting`],
    ["Requests", `${count(requests.underWay)} under way`, `${count(requests.putsWaiting)} puts and ${count(requests.largeWaiting)} large requests wait`],
    ["Memory of requests", size(requests.memory), `of ${size(requests.memoryLimit)}`],
  ]);
  table("calls-table", ["Path, method, class", "Calls/s", "In/s", "Out/s", "p50", "p99"],
    seen.calls.map((one) => [one.name, one.calls.toFixed(1), amount(one.into), amount(one.out), time(one.p50), time(one.p99)]));
  const now = new Map(seen.models.map((one) => [one.name, one.hits]));
  table("models-table", ["Model", "Hit ratio now", "Blocks looked up", "Hit ratio since the start", "Blocks looked up"],
    ever.models.map((one) => [model(one.name), ...[now.get(one.name), one.hits].flatMap((hits) => [percent(hits.rate), count(hits.asked)])]));
  table("tenants-table", ["Tenant", "Calls/s", "Bytes/s", "On disk", "Hit ratio"],
    seen.tenants.map((one) => [one.name, one.calls.toFixed(1), amount(one.bytes), size(one.disk), percent(one.hits.rate)]));
  table("peers-table", ["Path", "Bytes/s", "Outstanding"],
    seen.peers.map((one) => [one.name, amount(one.bytes), size(one.outstanding)]));
  plots();
}

function tell(events, when) {
  const list = find("events");
  for (const { what, count: many } of events) {
    list.prepend(element("li", `${when.toLocaleTimeString()}: ${count(many)} ${what}`));
  }
  find("no-events").hidden = list.children.length > 0;
  while (list.children.length > EVENTS_MAX) list.lastElementChild.remove();
}

// What was before the page was opened, as the server remembers it: on the page's own clock.
async function earlier(at) {
  const told = await ask("/history");
  const last = told.samples.at(-1)?.[0] ?? 0;
  return past(told).map(({ seconds, ...values }) => ({ at: at - (last - seconds) - 1e-3, values: PLOTS.map(([, , , , name]) => values[name]) }));
}

async function ask(path, headers = {}) {
  const answer = await fetch(path, { cache: "no-store", headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(answer.status === 401 ? await answer.text() : `the server returned the status ${answer.status}`);
  return answer.json();
}

function drawMap(told) {
  const shards = mapOf(told);
  const many = told.segments_per_cell > 1 ? `, ${told.segments_per_cell} in each cell` : "";
  say(find("segments-said"), `${count(told.segments)} segment files of ${size(told.segment_bytes)}${many}. Each cell shows how full its files are.`);
  const place = find("segments");
  fit(place, shards.length, () => element("figure", element("figcaption"), document.createElementNS(SVG, "svg")));
  shards.forEach(({ name, said, width, height, boxes }, at) => {
    const [caption, drawing] = place.children[at].children;
    say(caption, name);
    drawing.setAttribute("viewBox", `-1 -1 ${width + 1} ${height + 1}`);
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `${name}: ${said}`);
    fit(drawing, boxes.length, () => document.createElementNS(SVG, "rect"));
    boxes.forEach((box, n) => {
      for (const part of ["class", "x", "y", "width", "height"]) drawing.children[n].setAttribute(part, box[part]);
    });
  });
}

// The token stays in its field: it is neither stored nor shown.
async function showInside(event) {
  event?.preventDefault();
  const token = find("token").value.trim();
  const headers = token === "" ? {} : { authorization: `Bearer ${token}` };
  try {
    const wanted = find("model").value;
    const told = await ask(wanted ? `/prefixes?namespace=${encodeURIComponent(wanted)}` : "/prefixes", headers);
    const reads = readsOf(await ask("/reads", headers));
    const models = find("model");
    fit(models, told.models.length, () => element("option"));
    told.models.forEach((one, at) => {
      models.children[at].value = one.namespace;
      say(models.children[at], `${one.model} ${one.revision}, ${one.namespace.slice(0, 8)}, ${size(one.live_bytes)}`);
    });
    if (told.namespace) models.value = told.namespace;
    const more = told.is_cut ? " Only a part of the model was searched." : told.branches_left_out ? ` ${count(told.branches_left_out)} more are not shown.` : "";
    say(find("inside-said"), told.models.length ? `${count(told.branches.length)} runs of blocks.${more}` : "Nothing is stored.");
    const tokens = told.models.find((one) => one.namespace === told.namespace)?.block_tokens ?? 0;
    const rows = branchesOf(told, reads, tokens);
    table("prefixes-table", ["First block", "Blocks", "Tokens", "Forks", "Last read"], rows.map((row) => row.cells));
    table("reads-table", ["Began", "Path", "Model", "First block", "Blocks", "First layer", "Last layer", "Ended"], reads.map((one) => one.cells));
    offer("reads-table", reads.map((one) => one));
    offer("prefixes-table", rows.map((row) => row.read));
  } catch (error) {
    say(find("inside-said"), error.message);
    for (const id of ["prefixes-table", "reads-table"]) find(id).parentElement.hidden = true;
    find("timeline").hidden = true;
  }
}

// A row of a read that is known has a button that shows when its layers came.
function offer(id, reads) {
  const body = find(id).tBodies[0];
  [...(body?.rows ?? [])].forEach((row, at) => {
    const cell = row.cells[row.cells.length - 1];
    const read = reads[at];
    if (!read) return;
    const button = element("button", cell.textContent);
    button.type = "button";
    button.addEventListener("click", () => showTimeline(read));
    cell.replaceChildren(button);
  });
}

function showTimeline(read) {
  const layers = layersOf(read);
  find("timeline").hidden = false;
  say(find("timeline-title"), `Arrival time of each layer: ${read.said}`);
  const list = find("layers");
  fit(list, layers.length, () => element("li", element("span"), element("span"), element("progress")));
  layers.forEach(({ name, ms, part }, at) => {
    const [label, when, bar] = list.children[at].children;
    say(label, name);
    say(when, ms);
    bar.max = 1;
    bar.value = part;
    bar.setAttribute("aria-label", `${name}: ${ms}`);
  });
}

async function look() {
  try {
    const answer = await fetch("/metrics", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) throw new Error(`the server returned the status ${answer.status}`);
    const now = parse(await answer.text());
    const seen = figures(before, now);
    if (before) {
      const at = performance.now() / 1000;
      if (history.length === 0) history = await earlier(at);
      history = [...history.filter((one) => at - one.at < HISTORY_SECONDS), { at, values: PLOTS.map(([, of]) => of(seen)) }];
      tell(seen.events, new Date());
    }
    before = now;
    show(seen, figures(null, now));
    if (performance.now() / 1000 - mapped > MAP_SECONDS) {
      drawMap(await ask("/segments"));
      mapped = performance.now() / 1000;
    }
    document.body.dataset.looks = String(Number(document.body.dataset.looks ?? 0) + 1);
  } catch (error) {
    say(find("state"), `The server does not respond: ${error.message}`);
    find("state").classList.add("bad");
  }
}

async function rounds() {
  if (looking) return;
  clearTimeout(waiting);
  looking = true;
  if (!document.hidden) await look();
  looking = false;
  if (find("pause").getAttribute("aria-pressed") === "false") {
    waiting = setTimeout(rounds, Number(find("interval").value) * 1000);
  }
}

find("pause").addEventListener("click", () => {
  const paused = find("pause").getAttribute("aria-pressed") === "false";
  find("pause").setAttribute("aria-pressed", String(paused));
  if (paused) clearTimeout(waiting);
  else rounds();
});
find("inside").addEventListener("submit", showInside);
rounds();
