//! The figures that an operator looks at, from what the metrics said at two moments.

use serde::Serialize;

use super::sample::{Sample, Series};

/// Everything that is shown.
#[derive(Serialize, Clone, PartialEq, Debug, Default)]
pub(super) struct Figures {
    pub(super) version: String,
    /// Seconds between the two moments; 0: figures are since the server's start.
    pub(super) seconds: f64,
    /// Why the store takes no writes; empty if it does.
    pub(super) read_only: String,
    pub(super) dead_executors: u64,
    pub(super) failing_shards: u64,
    pub(super) directories_out: u64,
    pub(super) hits: Hits,
    pub(super) paths: Vec<PathFigures>,
    pub(super) disk: Disk,
    pub(super) requests: Requests,
    pub(super) tenants: Vec<Tenant>,
    pub(super) peers: Vec<Peer>,
    pub(super) events: Vec<Event>,
}

/// Blocks that reads asked for.
#[derive(Serialize, Clone, PartialEq, Debug, Default)]
pub(super) struct Hits {
    /// What lookups asked for, and what of it was here.
    pub(super) looked_up: f64,
    pub(super) found: f64,
    /// What was found of what lookups asked for; absent if they asked for nothing.
    pub(super) rate: Option<f64>,
    pub(super) delivered: f64,
    /// Not found, or found and not delivered.
    pub(super) missed: f64,
    /// Misses by reason, the most frequent first.
    pub(super) misses: Vec<(String, f64)>,
}

/// Calls of one kind over one path.
#[derive(Serialize, Clone, PartialEq, Debug, Default)]
pub(super) struct PathFigures {
    pub(super) path: String,
    pub(super) method: String,
    pub(super) class: String,
    pub(super) calls_per_second: f64,
    pub(super) bytes_in_per_second: f64,
    pub(super) bytes_out_per_second: f64,
    /// Bounds below which half and 99 of 100 calls ended; absent without calls.
    pub(super) p50_seconds: Option<f64>,
    pub(super) p99_seconds: Option<f64>,
}

/// The disks.
#[derive(Serialize, Clone, PartialEq, Debug, Default)]
pub(super) struct Disk {
    pub(super) budget_bytes: f64,
    pub(super) live_bytes: f64,
    pub(super) dead_bytes: f64,
    pub(super) free_bytes: f64,
    pub(super) blocks: f64,
    pub(super) read_bytes_per_second: f64,
    pub(super) written_bytes_per_second: f64,
    pub(super) waiting_operations: f64,
    pub(super) running_operations: f64,
}

/// Requests and their memory.
#[derive(Serialize, Clone, PartialEq, Debug, Default)]
pub(super) struct Requests {
    pub(super) under_way: f64,
    pub(super) puts_waiting: f64,
    pub(super) large_waiting: f64,
    pub(super) memory_used_bytes: f64,
    pub(super) memory_total_bytes: f64,
}

/// What one tenant has.
#[derive(Serialize, Clone, PartialEq, Debug, Default)]
pub(super) struct Tenant {
    pub(super) name: String,
    pub(super) calls_per_second: f64,
    pub(super) bytes_per_second: f64,
    /// What its lookups found of what they asked for; absent if they asked for nothing.
    pub(super) hit_rate: Option<f64>,
    pub(super) disk_bytes: f64,
}

/// Another node.
#[derive(Serialize, Clone, PartialEq, Debug, Default)]
pub(super) struct Peer {
    pub(super) node: String,
    pub(super) bytes_per_second: f64,
    pub(super) waiting_bytes: f64,
}

/// Something that happened between the two moments.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub(super) struct Event {
    pub(super) what: &'static str,
    pub(super) count: f64,
}

const LOOKUPS: &str = "kvarts_lookup_blocks_total";

/// Counters that an operator should hear of when they grow.
const EVENTS: [(&str, &str); 8] = [
    ("kvarts_engine_chunks_damaged_total", "chunks were damaged"),
    ("kvarts_engine_blocks_quarantined_total", "blocks were taken out of service"),
    ("kvarts_engine_blocks_refused_total", "blocks of puts were refused"),
    ("kvarts_engine_blocks_evicted_total", "blocks were evicted"),
    ("kvarts_engine_blocks_expired_total", "blocks expired"),
    ("kvarts_calls_refused_total", "calls were refused"),
    ("kvarts_device_failed_total", "operations of the disks failed"),
    ("kvarts_scrub_blocks_damaged_total", "blocks were found damaged by the scrubber"),
];

/// The figures of the time between two samples; of all the time if there is no earlier one.
pub(super) fn figures(before: Option<&Sample>, now: &Sample) -> Figures {
    let nothing = Sample::default();
    let seconds =
        before.map_or(0.0, |before| now.total("kvarts_time_seconds") - before.total("kvarts_time_seconds"));
    let change = Change {
        before: before.unwrap_or(&nothing),
        now,
        seconds: if seconds > 0.0 { seconds } else { f64::INFINITY },
    };
    let of_disk = |what: &str| now.sum("kvarts_disk_bytes", |series| series.label("what") == what);
    let in_queue = |place: &str| now.sum("kvarts_device_queue", |series| series.label("place") == place);
    let device = |direction: &str| {
        change.rate("kvarts_device_bytes_total", |series| series.label("direction") == direction)
    };
    let read_only = now.all("kvarts_read_only").iter().find(|series| series.value > 0.0);
    let version = now.all("kvarts_build_info").first().map_or("", |series| series.label("version"));
    Figures {
        version: version.to_owned(),
        seconds,
        read_only: read_only.map_or(String::new(), |series| series.label("reason").to_owned()),
        dead_executors: now.total("kvarts_dead_executors") as u64,
        failing_shards: now.total("kvarts_failing_shards") as u64,
        directories_out: now.total("kvarts_directory_out") as u64,
        hits: change.hits(),
        paths: change.paths(),
        disk: Disk {
            budget_bytes: now.total("kvarts_disk_budget_bytes"),
            live_bytes: of_disk("live"),
            dead_bytes: of_disk("dead"),
            free_bytes: of_disk("free") + now.total("kvarts_disk_free_bytes"),
            blocks: now.total("kvarts_index_blocks"),
            read_bytes_per_second: device("read"),
            written_bytes_per_second: device("written"),
            waiting_operations: in_queue("waiting"),
            running_operations: in_queue("device"),
        },
        requests: Requests {
            under_way: now.total("kvarts_calls_under_way"),
            puts_waiting: now.total("kvarts_puts_waiting"),
            large_waiting: now.total("kvarts_large_requests_waiting"),
            memory_used_bytes: now.total("kvarts_request_memory_bytes"),
            memory_total_bytes: now.total("kvarts_request_memory_limit_bytes"),
        },
        tenants: change.tenants(),
        peers: change.peers(),
        events: change.events(),
    }
}

struct Change<'a> {
    before: &'a Sample,
    now: &'a Sample,
    /// Infinite where there is no time between them: then all rates are zero.
    seconds: f64,
}

impl Change<'_> {
    /// By how much a counter grew. One that fell was begun anew: the server started again.
    fn growth(&self, name: &str, these: impl Fn(&Series) -> bool) -> f64 {
        let (before, now) = (self.before.sum(name, &these), self.now.sum(name, &these));
        if now >= before { now - before } else { now }
    }

    fn rate(&self, name: &str, these: impl Fn(&Series) -> bool) -> f64 {
        self.growth(name, these) / self.seconds
    }

    fn hits(&self) -> Hits {
        let delivered = self.growth("kvarts_blocks_delivered_total", |_| true);
        let reasons = self.now.labels("kvarts_blocks_missed_total", "reason");
        let of = |reason: String| {
            let count = self.growth("kvarts_blocks_missed_total", |series| series.label("reason") == reason);
            (reason, count)
        };
        let found = self.now.labels(LOOKUPS, "found").into_iter().filter(|found| found != "here");
        let not_found = found.map(|found| {
            let count = self.growth(LOOKUPS, |series| series.label("found") == found);
            (found, count)
        });
        let all = reasons.into_iter().map(of).chain(not_found);
        let mut misses: Vec<_> = all.filter(|(_, count)| *count > 0.0).collect();
        misses.sort_by(|one, other| other.1.total_cmp(&one.1));
        let missed = misses.iter().map(|(_, count)| count).sum::<f64>();
        let (looked_up, found) = self.lookups(|_| true);
        let rate = (looked_up > 0.0).then(|| found / looked_up);
        Hits { looked_up, found, rate, delivered, missed, misses }
    }

    /// Blocks that these lookups asked for, and those of them that were here.
    fn lookups(&self, these: impl Fn(&Series) -> bool) -> (f64, f64) {
        let found = |series: &Series| these(series) && series.label("found") == "here";
        (self.growth(LOOKUPS, &these), self.growth(LOOKUPS, found))
    }

    fn paths(&self) -> Vec<PathFigures> {
        let name = "kvarts_call_seconds_count";
        let mut kinds: Vec<(&str, &str, &str)> = self
            .now
            .all(name)
            .iter()
            .map(|series| (series.label("path"), series.label("method"), series.label("class")))
            .collect();
        kinds.sort_unstable();
        kinds.dedup();
        let of = |(path, method, class): (&str, &str, &str)| {
            let same = |series: &Series| {
                (series.label("path"), series.label("method"), series.label("class")) == (path, method, class)
            };
            let bytes = |direction: &str| {
                self.rate("kvarts_call_bytes_total", |series| {
                    same(series) && series.label("direction") == direction
                })
            };
            PathFigures {
                path: path.to_owned(),
                method: method.to_owned(),
                class: class.to_owned(),
                calls_per_second: self.rate(name, same),
                bytes_in_per_second: bytes("in"),
                bytes_out_per_second: bytes("out"),
                p50_seconds: self.quantile(0.5, &same),
                p99_seconds: self.quantile(0.99, &same),
            }
        };
        let mut all: Vec<PathFigures> =
            kinds.into_iter().map(of).filter(|one| one.p50_seconds.is_some()).collect();
        let carried =
            |one: &PathFigures| (one.bytes_in_per_second + one.bytes_out_per_second, one.calls_per_second);
        all.sort_by(|one, other| {
            let (one, other) = (carried(one), carried(other));
            other.0.total_cmp(&one.0).then(other.1.total_cmp(&one.1))
        });
        all
    }

    /// The least bound of the histogram below which so large a part of the calls ended.
    fn quantile(&self, part: f64, same: &impl Fn(&Series) -> bool) -> Option<f64> {
        let name = "kvarts_call_seconds_bucket";
        let mut bounds: Vec<f64> = self
            .now
            .labels(name, "le")
            .iter()
            .filter_map(|bound| bound.parse().ok())
            .filter(|bound: &f64| bound.is_finite())
            .collect();
        bounds.sort_by(f64::total_cmp);
        let all = self.growth("kvarts_call_seconds_count", same);
        let below =
            |bound: f64| self.growth(name, |series| same(series) && series.label("le").parse() == Ok(bound));
        (all > 0.0)
            .then(|| bounds.into_iter().find(|&bound| below(bound) >= part * all).unwrap_or(f64::INFINITY))
    }

    fn tenants(&self) -> Vec<Tenant> {
        let name = "kvarts_calls_total";
        let of = |tenant: String| {
            let same = |series: &Series| series.label("tenant") == tenant;
            let (looked_up, found) = self.lookups(same);
            Tenant {
                hit_rate: (looked_up > 0.0).then(|| found / looked_up),
                calls_per_second: self.rate(name, same),
                bytes_per_second: self.rate("kvarts_call_bytes_total", same),
                disk_bytes: self.now.sum("kvarts_tenant_disk_bytes", same),
                name: tenant,
            }
        };
        let mut names = self.now.labels(name, "tenant");
        names.extend(self.now.labels("kvarts_tenant_disk_bytes", "tenant"));
        names.sort();
        names.dedup();
        let mut all: Vec<Tenant> = names.into_iter().filter(|name| !name.is_empty()).map(of).collect();
        all.sort_by(|one, other| other.bytes_per_second.total_cmp(&one.bytes_per_second));
        all
    }

    fn peers(&self) -> Vec<Peer> {
        let name = "kvarts_cluster_path_bytes_total";
        let of = |node: String| {
            let same = |series: &Series| series.label("path") == node;
            Peer {
                bytes_per_second: self.rate(name, same),
                waiting_bytes: self.now.sum("kvarts_cluster_path_outstanding_bytes", same),
                node,
            }
        };
        self.now.labels(name, "path").into_iter().map(of).collect()
    }

    fn events(&self) -> Vec<Event> {
        let of = |&(name, what): &(&str, &'static str)| Event { what, count: self.growth(name, |_| true) };
        EVENTS.iter().map(of).filter(|event| event.count > 0.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a server says after `seconds` seconds, of which each brought the same.
    pub(super) fn at(seconds: u32) -> Sample {
        let n = f64::from(seconds);
        Sample::parse(&format!(
            "kvarts_build_info{{version=\"1.2.3\"}} 1\nkvarts_time_seconds {n}\n\
             kvarts_lookup_blocks_total{{tenant=\"a\",model=\"m\",found=\"here\"}} {}\n\
             kvarts_lookup_blocks_total{{tenant=\"a\",model=\"m\",found=\"evicted\"}} {}\n\
             kvarts_blocks_delivered_total{{tenant=\"a\",model=\"m\"}} {n}\n\
             kvarts_blocks_missed_total{{tenant=\"a\",model=\"m\",reason=\"damaged\"}} 4\n\
             kvarts_call_seconds_count{{path=\"grpc\",method=\"get\",class=\"foreground\"}} {}\n\
             kvarts_call_seconds_bucket{{path=\"grpc\",method=\"get\",class=\"foreground\",le=\"0.001\"}} {}\n\
             kvarts_call_seconds_bucket{{path=\"grpc\",method=\"get\",class=\"foreground\",le=\"0.01\"}} {}\n\
             kvarts_call_seconds_bucket{{path=\"grpc\",method=\"get\",class=\"foreground\",le=\"+Inf\"}} {}\n\
             kvarts_call_bytes_total{{path=\"grpc\",method=\"get\",class=\"foreground\",tenant=\"a\",direction=\"out\"}} {}\n\
             kvarts_calls_total{{path=\"grpc\",method=\"get\",class=\"foreground\",tenant=\"a\",code=\"OK\"}} {}\n\
             kvarts_tenant_disk_bytes{{tenant=\"b\"}} 77\n\
             kvarts_device_failed_total{{executor=\"0\"}} {n}\nkvarts_read_only{{reason=\"no disk\"}} 1\n\
             kvarts_cluster_path_bytes_total{{path=\"node-2\"}} {}\n",
            9.0 * n,
            n,
            100.0 * n,
            60.0 * n,
            98.0 * n,
            100.0 * n,
            n * 1048576.0,
            100.0 * n,
            n * 1024.0,
        ))
    }

    #[test]
    fn rates_are_of_the_time_between_two_samples() {
        let figures = figures(Some(&at(10)), &at(14));
        assert_eq!((figures.seconds, figures.version.as_str()), (4.0, "1.2.3"));
        assert_eq!(figures.hits.rate, Some(0.9));
        assert_eq!(figures.hits.misses, [("evicted".to_owned(), 4.0)]);
        let [path] = figures.paths.as_slice() else { panic!("{figures:?}") };
        assert_eq!((path.calls_per_second, path.bytes_out_per_second), (100.0, 1048576.0));
        assert_eq!((path.p50_seconds, path.p99_seconds), (Some(0.001), Some(f64::INFINITY)));
        assert_eq!(figures.read_only, "no disk");
        let names: Vec<&str> = figures.tenants.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let [of_a, of_b] = figures.tenants.as_slice() else { panic!("{figures:?}") };
        assert_eq!((of_a.hit_rate, of_b.hit_rate, of_b.disk_bytes), (Some(0.9), None, 77.0));
        assert_eq!(figures.peers[0].bytes_per_second, 1024.0);
        assert_eq!(figures.events, [Event { what: "operations of the disks failed", count: 4.0 }]);
    }

    #[test]
    fn without_an_earlier_sample_counts_are_since_the_start_and_rates_are_none() {
        let figures = figures(None, &at(10));
        assert_eq!((figures.hits.found, figures.hits.looked_up, figures.hits.delivered), (90.0, 100.0, 10.0));
        assert_eq!(figures.paths[0].calls_per_second, 0.0);
        assert_eq!(figures.seconds, 0.0);
    }

    #[test]
    fn a_server_that_started_again_has_no_negative_rates() {
        let figures = figures(Some(&at(1000)), &at(3));
        assert!(figures.hits.delivered >= 0.0 && figures.paths.iter().all(|one| one.calls_per_second >= 0.0));
    }
}
