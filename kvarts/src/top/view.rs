//! The figures as lines of a screen.

use std::fmt::Write;

use kvarts_server::human::{bytes, grouped};

use super::figures::{Figures, PathFigures};

/// The lines, at most `rows` of them and none wider than `columns`.
pub(super) fn lines(figures: &Figures, rows: usize, columns: usize) -> Vec<String> {
    let mut all = head(figures);
    let (mut tables, foot) = ([calls(figures), tenants(figures), peers(figures)], events(figures));
    // Tables give way to what stands below them, the longest first; each keeps its heading and one line.
    let fixed = all.len() + foot.len();
    while fixed + tables.iter().map(Vec::len).sum::<usize>() > rows {
        match tables.iter_mut().max_by_key(|table| table.len()) {
            Some(table) if table.len() > 2 => drop(table.pop()),
            _ => break,
        }
    }
    all.extend(tables.into_iter().flatten());
    all.extend(foot);
    all.truncate(rows);
    all.into_iter().map(|line| line.chars().take(columns).collect::<String>().trim_end().to_owned()).collect()
}

fn head(figures: &Figures) -> Vec<String> {
    let Figures { disk, requests, hits, .. } = figures;
    let state = match (figures.read_only.as_str(), figures.dead_executors, figures.failing_shards) {
        ("", 0, 0) if figures.directories_out > 0 => {
            format!("{} DIRECTORIES OUT OF USE", figures.directories_out)
        }
        ("", 0, 0) => "well".to_owned(),
        ("", 0, shards) => format!("{shards} SHARDS REFUSE PUTS: their device fails writes"),
        (why, ..) => format!("READ-ONLY: {why}"),
    };
    let span = if figures.seconds > 0.0 {
        format!("last {:.1} s", figures.seconds)
    } else {
        "since the start".to_owned()
    };
    let rate = match hits.rate {
        None => "none looked up".to_owned(),
        Some(rate) => format!("{:.1}% of {} looked up", rate * 100.0, count(hits.looked_up)),
    };
    let mut blocks =
        format!("blocks    {rate}, {} delivered, {} missed", count(hits.delivered), count(hits.missed));
    for (number, (reason, missed)) in hits.misses.iter().take(3).enumerate() {
        let _ = write!(blocks, "{} {} {reason}", if number == 0 { ":" } else { "," }, count(*missed));
    }
    vec![
        format!("kvarts {}  {state}  ({span})", figures.version),
        blocks,
        format!(
            "disk      {} live, {} dead, {} free of {}; {} blocks",
            size(disk.live_bytes),
            size(disk.dead_bytes),
            size(disk.free_bytes),
            size(disk.budget_bytes),
            count(disk.blocks)
        ),
        format!(
            "devices   {}/s read, {}/s written; {} operations under way, {} waiting",
            size(disk.read_bytes_per_second),
            size(disk.written_bytes_per_second),
            count(disk.running_operations),
            count(disk.waiting_operations)
        ),
        format!(
            "requests  {} under way, {} puts waiting, {} large requests waiting; memory {} of {}",
            count(requests.under_way),
            count(requests.puts_waiting),
            count(requests.large_waiting),
            size(requests.memory_used_bytes),
            size(requests.memory_total_bytes)
        ),
    ]
}

fn calls(figures: &Figures) -> Vec<String> {
    let mut all = vec![
        String::new(),
        format!("{:<28} {:>9} {:>11} {:>11} {:>8} {:>8}", "CALLS", "PER S", "IN/S", "OUT/S", "P50", "P99"),
    ];
    let line = |one: &PathFigures| {
        let name = format!("{} {} {}", one.path, one.method, one.class);
        let (calls, into, out) =
            (one.calls_per_second, size(one.bytes_in_per_second), size(one.bytes_out_per_second));
        format!(
            "{name:<28} {calls:>9.1} {into:>11} {out:>11} {:>8} {:>8}",
            time(one.p50_seconds),
            time(one.p99_seconds)
        )
    };
    all.extend(figures.paths.iter().map(line));
    if figures.paths.is_empty() {
        all.push("none".to_owned());
    }
    all
}

fn tenants(figures: &Figures) -> Vec<String> {
    if figures.tenants.is_empty() {
        return Vec::new();
    }
    let mut all = vec![
        String::new(),
        format!("{:<28} {:>9} {:>11} {:>11} {:>8}", "TENANT", "PER S", "BYTES/S", "ON DISK", "HITS"),
    ];
    all.extend(figures.tenants.iter().map(|one| {
        let (calls, carried, disk) = (one.calls_per_second, size(one.bytes_per_second), size(one.disk_bytes));
        let hits = one.hit_rate.map_or("-".to_owned(), |rate| format!("{:.1}%", rate * 100.0));
        format!("{:<28} {calls:>9.1} {carried:>11} {disk:>11} {hits:>8}", one.name)
    }));
    all
}

fn peers(figures: &Figures) -> Vec<String> {
    if figures.peers.is_empty() {
        return Vec::new();
    }
    let mut all =
        vec![String::new(), format!("{:<28} {:>21} {:>11}", "PATH OF READS", "BYTES/S", "OUTSTANDING")];
    all.extend(figures.peers.iter().map(|one| {
        format!("{:<28} {:>21} {:>11}", one.node, size(one.bytes_per_second), size(one.waiting_bytes))
    }));
    all
}

fn events(figures: &Figures) -> Vec<String> {
    let events: Vec<String> =
        figures.events.iter().map(|event| format!("{} {}", count(event.count), event.what)).collect();
    if events.is_empty() {
        Vec::new()
    } else {
        vec![String::new(), format!("events    {}", events.join("; "))]
    }
}

fn count(number: f64) -> String {
    grouped(number.max(0.0) as u64)
}

/// Bytes in at most nine letters.
fn size(number: f64) -> String {
    bytes(number.max(0.0) as u64)
}

/// A time with its unit; a bound that no call passed is told as such.
fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(seconds) if seconds.is_infinite() => "long".to_owned(),
        Some(seconds) if seconds < 0.001 => format!("{:.0} us", seconds * 1e6),
        Some(seconds) if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) => format!("{seconds:.1} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::{Event, Hits, Peer, Tenant};
    use super::*;

    fn crowded() -> Figures {
        let path = |n: usize| PathFigures {
            path: "local".to_owned(),
            method: format!("method{n}"),
            p50_seconds: Some(0.0005),
            ..Default::default()
        };
        Figures {
            version: "1.0.0".to_owned(),
            seconds: 2.0,
            hits: Hits {
                looked_up: 10.0,
                found: 9.0,
                rate: Some(0.9),
                delivered: 9.0,
                missed: 1.0,
                misses: vec![("evicted".to_owned(), 1.0)],
            },
            paths: (0..40).map(path).collect(),
            tenants: (0..40).map(|n| Tenant { name: format!("tenant{n}"), ..Default::default() }).collect(),
            peers: (0..40).map(|n| Peer { node: format!("node{n}"), ..Default::default() }).collect(),
            events: vec![Event { what: "chunks were damaged", count: 3.0 }],
            ..Default::default()
        }
    }

    #[test]
    fn a_screen_of_80_by_24_holds_all_parts_however_much_there_is() {
        for (rows, columns) in [(24, 80), (50, 200), (14, 40)] {
            let lines = lines(&crowded(), rows, columns);
            assert!(lines.len() <= rows, "{rows}: {}", lines.len());
            assert!(lines.iter().all(|line| line.chars().count() <= columns));
            let text = lines.join("\n");
            for part in ["90.0% of 10 looked up", "CALLS", "TENANT", "PATH OF READS"] {
                assert!(text.contains(part), "{part} in {rows} rows:\n{text}");
            }
        }
        assert!(lines(&crowded(), 24, 80).last().is_some_and(|line| line.contains("3 chunks were damaged")));
    }

    #[test]
    fn a_store_that_takes_no_writes_says_so_first() {
        let figures = Figures { read_only: "the disk is gone".to_owned(), ..Default::default() };
        let lines = lines(&figures, 24, 80);
        assert!(lines[0].contains("READ-ONLY: the disk is gone"), "{lines:?}");
        assert!(lines[1].contains("none looked up"), "{lines:?}");
        let figures = Figures { directories_out: 2, ..Default::default() };
        assert!(super::lines(&figures, 24, 80)[0].contains("2 DIRECTORIES OUT"), "{figures:?}");
    }
}
