// The figures of `kvarts top`, from what the metrics said at two moments. Nothing here touches the page.

// Values by name, each with its labels; a line that is none of a value is passed over.
export function parse(text) {
  const all = new Map();
  for (const line of text.split("\n")) {
    const head = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{| )/.exec(line);
    if (!head) continue;
    const labels = new Map();
    let rest = line.slice(head[0].length);
    if (head[2] === "{") {
      const label = /^,?([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/;
      for (let one; (one = label.exec(rest)); rest = rest.slice(one[0].length)) {
        labels.set(one[1], one[2].replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter)));
      }
      if (rest[0] !== "}") continue;
      rest = rest.slice(1);
    }
    const word = rest.trim().split(" ")[0];
    const value = word === "+Inf" ? Infinity : word === "" ? NaN : Number(word);
    if (Number.isNaN(value)) continue;
    if (!all.has(head[1])) all.set(head[1], []);
    all.get(head[1]).push({ labels, value });
  }
  return all;
}

const of = (sample, name) => sample.get(name) ?? [];
const sum = (sample, name, these = () => true) =>
  of(sample, name).filter(these).reduce((total, series) => total + series.value, 0);
const named = (wanted) => (series) => Object.entries(wanted).every(([name, value]) => series.labels.get(name) === value);
const values = (sample, name, label) => [...new Set(of(sample, name).map((series) => series.labels.get(label) ?? ""))].sort();

// Counters that an operator should hear of when they grow.
const EVENTS = [
  ["kvarts_engine_chunks_damaged_total", "chunks were damaged"],
  ["kvarts_engine_blocks_quarantined_total", "blocks were taken out of service"],
  ["kvarts_engine_blocks_refused_total", "blocks of puts were refused"],
  ["kvarts_engine_blocks_evicted_total", "blocks were evicted"],
  ["kvarts_engine_blocks_expired_total", "blocks expired"],
  ["kvarts_calls_refused_total", "calls were refused"],
  ["kvarts_device_failed_total", "operations of the disks failed"],
  ["kvarts_scrub_blocks_damaged_total", "blocks were found damaged by the scrubber"],
];
const LOOKUPS = "kvarts_lookup_blocks_total";

// The figures of the time between two samples; without an earlier one counts are since the start and rates are none.
export function figures(before, now) {
  const earlier = before ?? new Map();
  const passed = before ? sum(now, "kvarts_time_seconds") - sum(before, "kvarts_time_seconds") : 0;
  const seconds = passed > 0 ? passed : Infinity;
  // A counter that fell was begun anew: the server started again.
  const growth = (name, these) => {
    const [was, is] = [sum(earlier, name, these), sum(now, name, these)];
    return is >= was ? is - was : is;
  };
  const rate = (name, these) => growth(name, these) / seconds;
  const ratio = (these) => {
    const asked = growth(LOOKUPS, these);
    const found = growth(LOOKUPS, (series) => these(series) && series.labels.get("found") === "here");
    return { asked, found, rate: asked > 0 ? found / asked : null };
  };
  const misses = [
    ...values(now, "kvarts_blocks_missed_total", "reason").map((reason) => [reason, growth("kvarts_blocks_missed_total", named({ reason }))]),
    ...values(now, LOOKUPS, "found").filter((found) => found !== "here").map((found) => [found, growth(LOOKUPS, named({ found }))]),
  ].filter(([, count]) => count > 0).sort((one, other) => other[1] - one[1]);

  const quantile = (part, kind) => {
    const name = "kvarts_call_seconds_bucket";
    const all = growth("kvarts_call_seconds_count", named(kind));
    if (!(all > 0)) return null;
    const bounds = values(now, name, "le").map(Number).filter(Number.isFinite).sort((a, b) => a - b);
    const below = (bound) => growth(name, (series) => named(kind)(series) && Number(series.labels.get("le")) === bound);
    return bounds.find((bound) => below(bound) >= part * all) ?? Infinity;
  };
  const kinds = new Map();
  for (const { labels } of of(now, "kvarts_call_seconds_count")) {
    const kind = { path: labels.get("path"), method: labels.get("method"), class: labels.get("class") };
    kinds.set(Object.values(kind).join(" "), kind);
  }
  const calls = [...kinds].map(([name, kind]) => ({
    name,
    calls: rate("kvarts_call_seconds_count", named(kind)),
    into: rate("kvarts_call_bytes_total", named({ ...kind, direction: "in" })),
    out: rate("kvarts_call_bytes_total", named({ ...kind, direction: "out" })),
    p50: quantile(0.5, kind),
    p99: quantile(0.99, kind),
  })).filter((one) => one.p50 !== null)
    .sort((one, other) => other.into + other.out - one.into - one.out || other.calls - one.calls);

  const tenantNames = [...new Set([...values(now, "kvarts_calls_total", "tenant"), ...values(now, "kvarts_tenant_disk_bytes", "tenant")])];
  const tenants = tenantNames.filter((name) => name !== "").map((tenant) => ({
    name: tenant,
    calls: rate("kvarts_calls_total", named({ tenant })),
    bytes: rate("kvarts_call_bytes_total", named({ tenant })),
    disk: sum(now, "kvarts_tenant_disk_bytes", named({ tenant })),
    hits: ratio(named({ tenant })),
  })).sort((one, other) => other.bytes - one.bytes || (one.name < other.name ? -1 : 1));
  const models = values(now, LOOKUPS, "model").map((model) => ({ name: model, hits: ratio(named({ model })) }))
    .sort((one, other) => other.hits.asked - one.hits.asked || (one.name < other.name ? -1 : 1));
  const peers = values(now, "kvarts_cluster_path_bytes_total", "path").map((path) => ({
    name: path,
    bytes: rate("kvarts_cluster_path_bytes_total", named({ path })),
    outstanding: sum(now, "kvarts_cluster_path_outstanding_bytes", named({ path })),
  }));
  const readOnly = of(now, "kvarts_read_only").find((series) => series.value > 0);
  return {
    version: of(now, "kvarts_build_info")[0]?.labels.get("version") ?? "",
    store: of(now, "kvarts_store_info")[0]?.labels.get("store") ?? "",
    uptime: of(now, "process_start_time_seconds").length ? sum(now, "kvarts_time_seconds") - sum(now, "process_start_time_seconds") : null,
    seconds: passed > 0 ? passed : 0,
    readOnly: readOnly ? readOnly.labels.get("reason") ?? "" : null,
    deadExecutors: sum(now, "kvarts_dead_executors"),
    failingShards: sum(now, "kvarts_failing_shards"),
    hits: ratio(() => true),
    delivered: growth("kvarts_blocks_delivered_total"),
    missed: misses.reduce((total, [, count]) => total + count, 0),
    misses,
    calls,
    tenants,
    models,
    peers,
    disk: {
      budget: sum(now, "kvarts_disk_budget_bytes"),
      live: sum(now, "kvarts_disk_bytes", named({ what: "live" })),
      dead: sum(now, "kvarts_disk_bytes", named({ what: "dead" })),
      free: sum(now, "kvarts_disk_bytes", named({ what: "free" })) + sum(now, "kvarts_disk_free_bytes"),
      blocks: sum(now, "kvarts_index_blocks"),
      read: rate("kvarts_device_bytes_total", named({ direction: "read" })),
      written: rate("kvarts_device_bytes_total", named({ direction: "written" })),
      waiting: sum(now, "kvarts_device_queue", named({ place: "waiting" })),
      running: sum(now, "kvarts_device_queue", named({ place: "device" })),
    },
    requests: {
      underWay: sum(now, "kvarts_calls_under_way"),
      putsWaiting: sum(now, "kvarts_puts_waiting"),
      largeWaiting: sum(now, "kvarts_large_requests_waiting"),
      memory: sum(now, "kvarts_request_memory_bytes"),
      memoryLimit: sum(now, "kvarts_request_memory_limit_bytes"),
    },
    events: EVENTS.map(([name, what]) => ({ what, count: growth(name) })).filter((event) => event.count > 0),
  };
}

// What the server remembers of the last hour, between each two of its samples: when in seconds, and the values that are plotted.
export function past({ columns, samples }) {
  const of = (sample, name) => sample[columns.indexOf(name)];
  return samples.slice(1).map((now, at) => {
    const before = samples[at];
    const growth = (name) => Math.max(0, of(now, name) - of(before, name));
    const seconds = Math.max(1, of(now, "unix_seconds") - of(before, "unix_seconds"));
    const asked = growth("asked");
    return {
      seconds: of(now, "unix_seconds"),
      rate: asked > 0 ? growth("found") / asked : null,
      out: growth("bytes_out") / seconds,
      into: growth("bytes_in") / seconds,
      live: of(now, "live_bytes"),
    };
  });
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  let value = Math.max(0, bytes);
  while (value >= 1024 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${at === 0 ? Math.round(value) : value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0)} ${units[at]}`;
}
export const count = (number) => Math.round(Math.max(0, number)).toLocaleString("en-US");
export const percent = (rate) => (rate === null ? "none" : `${(rate * 100).toFixed(1)}%`);
export function time(seconds) {
  if (seconds === null) return "none";
  if (!Number.isFinite(seconds)) return "long";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} us`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(1)} ms` : `${seconds.toFixed(1)} s`;
}
// A long time, in its largest whole unit.
export function span(seconds) {
  const units = [["days", 86_400], ["h", 3600], ["min", 60]];
  const [unit, each] = units.find(([, one]) => seconds >= 2 * one) ?? ["s", 1];
  return `${Math.floor(Math.max(0, seconds) / each)} ${unit}`;
}
// Names that the server gives to what has none of its own, in words.
const WORDS = new Map([
  ["unregistered", "unregistered: look-ups of models that no client has registered"],
  ["other", "other: all models that are not counted by name"],
]);
export const model = (name) => WORDS.get(name) ?? name;
