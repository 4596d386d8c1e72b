//! What must hold on hardware, judged by the figures of the steps; and the page for people.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::steps::{CONNECTIONS, Outcome, SHAPES};

/// Sizes of small pieces: those of layers of today's models.
const SMALL: [u64; 4] = [8 << 10, 16 << 10, 28 << 10, 40 << 10];
const MIB: u64 = 1 << 20;
/// Models whose pages land: as `landing_beside_the_bare_copy` calls them.
const LANDED: [&str; 4] =
    ["llama-3.1-8b tp1", "llama-3.1-70b tp8", "deepseek-v3.2 tp1", "deepseek-v4-pro tp1"];

/// What must hold: what, how much of it was found, and the least or the most that it may be. What is not known says why.
struct Must {
    what: String,
    found: Option<f64>,
    bound: f64,
    is_least: bool,
    why: String,
}

impl Must {
    fn least(what: impl Into<String>, found: Result<f64, String>, bound: f64) -> Self {
        Self::new(what.into(), found, bound, true)
    }

    fn most(what: impl Into<String>, found: Result<f64, String>, bound: f64) -> Self {
        Self::new(what.into(), found, bound, false)
    }

    fn new(what: String, found: Result<f64, String>, bound: f64, is_least: bool) -> Self {
        let (found, why) = match found {
            Ok(found) => (Some(found), String::new()),
            Err(why) => (None, why),
        };
        Self { what, found, bound, is_least, why }
    }

    fn json(&self) -> Value {
        let holds =
            self.found.map(|found| if self.is_least { found >= self.bound } else { found <= self.bound });
        let word = match holds {
            None => "not known",
            Some(true) => "holds",
            Some(false) => "DOES NOT HOLD",
        };
        let bound = format!("{} {}", if self.is_least { "at least" } else { "at most" }, self.bound);
        json!({ "must": self.what, "bound": bound, "found": self.found, "judged": word, "why": self.why })
    }
}

fn step<'a>(all: &'a [Outcome], name: &str) -> Option<&'a Outcome> {
    all.iter().find(|outcome| outcome.name == name)
}

/// Figures of a step, or why there are none.
fn figures<'a>(all: &'a [Outcome], name: &str) -> Result<&'a [Value], String> {
    match step(all, name) {
        None => Err(format!("`{name}` has not run yet")),
        Some(outcome) if outcome.failed.is_some() || outcome.not_run.is_some() => {
            Err(format!("`{name}`: {}", outcome.line()))
        }
        Some(outcome) => Ok(&outcome.figures),
    }
}

/// Bytes a second of copies: those of one way, or the best of ours.
fn rate(figures: &[Value], direction: &str, piece: u64, bare: bool) -> Option<f64> {
    let is_it = |figure: &&Value| {
        figure["figure"] == "copy"
            && figure["direction"] == direction
            && figure["piece_bytes"] == piece
            && (figure["way"] == "bare") == bare
    };
    figures.iter().filter(is_it).filter_map(|figure| figure["bytes_per_second"].as_f64()).reduce(f64::max)
}

/// The best rate of the bare loop: what the link gives.
fn link(figures: &[Value], direction: &str) -> Option<f64> {
    let sizes = figures.iter().filter_map(|figure| figure["piece_bytes"].as_u64());
    sizes.filter_map(|piece| rate(figures, direction, piece, true)).reduce(f64::max)
}

fn copies(all: &[Outcome], musts: &mut Vec<Must>) {
    let found = figures(all, "copies by size of pieces");
    let share = |piece: u64, of_link: bool| -> Result<f64, String> {
        let figures = found.clone()?;
        let ours = rate(figures, "to device", piece, false);
        let bare = if of_link { link(figures, "to device") } else { rate(figures, "to device", piece, true) };
        ours.zip(bare).map(|(ours, bare)| ours / bare).ok_or_else(|| format!("no figure of {piece} bytes"))
    };
    musts.push(Must::least(
        "host to device, pieces of 1 MiB, of the bare loop (aim 0.95)",
        share(MIB, false),
        0.90,
    ));
    for piece in SMALL {
        let what = format!("host to device, pieces of {} KiB, of the link (aim 0.8)", piece >> 10);
        musts.push(Must::least(what, share(piece, true), 0.5));
    }
}

/// Landing and saving: of each model the share of the link, and what an engine's thread spends.
fn landing(all: &[Outcome], musts: &mut Vec<Must>) {
    let name = "landing beside the bare copy";
    let found = figures(all, name);
    for model in LANDED {
        let of = |field: &str| -> Result<f64, String> {
            let figure = found.clone()?.iter().find(|figure| figure["model"] == model);
            figure.and_then(|figure| figure[field].as_f64()).ok_or_else(|| format!("no figure of {model}"))
        };
        musts.push(Must::least(
            format!("{model}: landing, of the link (aim 0.95)"),
            of("land_of_link"),
            0.90,
        ));
        musts.push(Must::least(format!("{model}: saving, of the link (aim 0.95)"), of("save_of_link"), 0.90));
        let what = format!("{model}: milliseconds of the engine's thread for a layer");
        musts.push(Must::most(what, of("host_us_per_layer").map(|us| us / 1e3), 0.02));
    }
}

/// An engine whose kernels fill the device, while a request lands.
fn slowdown(all: &[Outcome], musts: &mut Vec<Must>) {
    for connections in CONNECTIONS {
        let name = format!("an engine's step beside a landing, {connections} queues");
        let of = |field: &str| -> Result<f64, String> {
            let figure = figures(all, &name)?.first().map(|figure| figure[field].as_f64());
            figure.flatten().ok_or_else(|| "it told nothing".to_owned())
        };
        // What differs without a landing as well is no slowdown.
        let found = of("slowdown").and_then(|slowdown| {
            let control = of("control")?;
            let is_noise = slowdown > 0.02 && slowdown - control <= 0.02;
            if is_noise { Err(format!("{slowdown:.3}, by itself {control:.3}")) } else { Ok(slowdown) }
        });
        musts.push(Must::most(format!("{name}: longer by"), found, 0.02));
    }
}

fn layers(all: &[Outcome], musts: &mut Vec<Must>) {
    for (model, tp) in SHAPES {
        let name = format!("layers {model} tp{tp}");
        let row = figures(all, &name)
            .and_then(|figures| figures.first().ok_or_else(|| format!("`{name}` told nothing")))
            .map(|found| found["models"][0].clone());
        let of = |field: &str| -> Result<f64, String> {
            row.clone()?[field].as_f64().ok_or_else(|| format!("`{name}` has no {field}"))
        };
        let is = |field: &str| row.clone().map(|row| f64::from(u8::from(row[field] == true)));
        musts.push(Must::least(format!("{name}: pipeline_ratio"), of("pipeline_ratio"), 0.95));
        let first = || -> Result<f64, String> {
            let bare = of("first_ms")? + of("copy_ms")? / of("layers")?.max(1.0);
            Ok(of("first_layer_ms")? / bare)
        };
        musts.push(Must::most(format!("{name}: first layer, of a bare read and copy"), first(), 1.25));
        musts.push(Must::least(format!("{name}: every byte that landed is right"), is("bytes_right"), 1.0));
        musts.push(Must::least(format!("{name}: what left came again as it was"), is("back_right"), 1.0));
    }
}

fn digests(all: &[Outcome], musts: &mut Vec<Must>) {
    let worst = figures(all, "digests on the device").and_then(|figures| {
        if let Some(wrong) = figures.iter().find(|figure| figure["right"] == false) {
            return Err(format!("WRONG digests: {wrong}"));
        }
        let shares = figures.iter().filter_map(|figure| figure["share"].as_f64());
        shares
            .reduce(f64::max)
            .ok_or_else(|| figures.first().map_or("none were told".to_owned(), Value::to_string))
    });
    musts.push(Must::most("digests on the device, of the copy's time, the worst size", worst, 0.05));
    let right = figures(all, "probe").map(|figures| {
        let digests = figures.first().map(|probe| probe["device_digests"] == "right");
        f64::from(u8::from(digests == Some(true)))
    });
    musts.push(Must::least("the digests of the probe are right", right, 1.0));
}

fn tests(all: &[Outcome], musts: &mut Vec<Must>) {
    let failed = match step(all, "device tests") {
        Some(outcome) if !outcome.tests.is_empty() => {
            Ok(outcome.tests.iter().filter(|test| test[1] == "failed").count() as f64)
        }
        Some(outcome) => Err(outcome.line()),
        None => Err("`device tests` has not run yet".to_owned()),
    };
    musts.push(Must::most("device tests that fail", failed, 0.0));
    let soak = figures(all, "R25 on the device")
        .and_then(|figures| figures.first().ok_or_else(|| "it told nothing".to_owned()));
    let grown = |field: &str| -> Result<f64, String> {
        let soak = soak.clone()?;
        let [first, last] = [0, 1].map(|at| soak[field][at].as_f64());
        first.zip(last).map(|(first, last)| last - first).ok_or_else(|| format!("it has no {field}"))
    };
    musts.push(Must::most("threads more after R25 than after its first round", grown("threads"), 2.0));
    musts.push(Must::most("pinned kB more after R25 than after its first round", grown("pinned_kb"), 1024.0));
}

/// All of them. Of a run that moves little no rate is judged.
pub(crate) fn musts(all: &[Outcome], small: bool) -> Vec<Value> {
    let mut musts = Vec::new();
    tests(all, &mut musts);
    copies(all, &mut musts);
    landing(all, &mut musts);
    slowdown(all, &mut musts);
    layers(all, &mut musts);
    digests(all, &mut musts);
    if small {
        let is_rate = |must: &Must| must.bound.fract() != 0.0;
        for must in musts.iter_mut().filter(|must| is_rate(must)) {
            (must.found, must.why) = (None, "so little is moved that it says nothing of speed".to_owned());
        }
    }
    musts.iter().map(Must::json).collect()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The page for people.
pub(crate) fn page(report: &Value, all: &[Outcome], small: bool) -> String {
    let mut page = String::new();
    // Text into a string does not fail.
    let _ = write_page(&mut page, report, all, small);
    page
}

fn write_page(page: &mut String, report: &Value, all: &[Outcome], small: bool) -> std::fmt::Result {
    let machine = &report["machine"];
    writeln!(
        page,
        "Kvarts on a GPU, at {} (seconds since 1970), {} s",
        report["unix_seconds"], report["seconds"]
    )?;
    for (name, fact) in machine.as_object().into_iter().flatten() {
        writeln!(page, "{name}: {}", text(fact).lines().next().unwrap_or_default())?;
    }
    if small {
        writeln!(page, "SMALL: it shows that everything runs. No rate is judged.")?;
    }
    writeln!(page, "\nSTEPS")?;
    for outcome in all {
        writeln!(page, "{:<30} {:>6.1} s  {}", outcome.name, outcome.seconds, outcome.line())?;
    }
    writeln!(page, "\nMUSTS")?;
    for must in report["musts"].as_array().into_iter().flatten() {
        let found = must["found"].as_f64().map_or_else(|| text(&must["why"]), |found| format!("{found:.3}"));
        let (judged, what, bound) = (text(&must["judged"]), text(&must["must"]), text(&must["bound"]));
        writeln!(page, "{judged:<14} {what}: {found} ({bound})")?;
    }
    let tests = all.iter().flat_map(|outcome| &outcome.tests).filter(|test| test[1] != "passed");
    writeln!(page, "\nTESTS THAT DID NOT PASS, OR CANNOT RUN HERE")?;
    for test in tests {
        writeln!(page, "{:<9} {}: {}", test[1], test[0], test[2])?;
    }
    write_copies(page, all)?;
    write_layers(page, all)
}

fn write_copies(page: &mut String, all: &[Outcome]) -> std::fmt::Result {
    let Ok(figures) = figures(all, "copies by size of pieces") else { return Ok(()) };
    writeln!(
        page,
        "\nCOPIES, GB/s{:>14} {:>8} {:>8} {:>8} {:>8}",
        "PIECE BYTES", "BARE", "EACH", "BATCH", "KERNEL"
    )?;
    for direction in ["to device", "to host"] {
        let sizes: BTreeSet<u64> =
            figures.iter().filter_map(|figure| figure["piece_bytes"].as_u64()).collect();
        for piece in sizes {
            let way = |name: &str| {
                let is_it = |figure: &&Value| {
                    figure["piece_bytes"] == piece
                        && figure["direction"] == direction
                        && figure["way"] == name
                };
                let rate = figures.iter().find(is_it).and_then(|figure| figure["bytes_per_second"].as_f64());
                rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.2}", rate / 1e9))
            };
            let [bare, each, batch, kernel] = ["bare", "each", "batch", "kernel"].map(way);
            writeln!(page, "{direction:<12}{piece:>14} {bare:>8} {each:>8} {batch:>8} {kernel:>8}")?;
        }
    }
    Ok(())
}

fn write_layers(page: &mut String, all: &[Outcome]) -> std::fmt::Result {
    writeln!(
        page,
        "\nLAYERS, ms {:>33} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "MIB", "READ", "COPY", "PIPE", "FIRST", "BACK", "RATIO"
    )?;
    for outcome in all.iter().filter(|outcome| outcome.name.starts_with("layers ")) {
        for row in outcome.figures.iter().filter_map(|found| found["models"].get(0)) {
            let of = |field: &str| {
                row[field].as_f64().map_or_else(|| "-".to_owned(), |found| format!("{found:.2}"))
            };
            let mib = row["bytes"].as_u64().unwrap_or_default() >> 20;
            let fields =
                ["bare_ms", "copy_ms", "pipeline_ms", "first_layer_ms", "back_ms", "pipeline_ratio"].map(of);
            let [read, copy, pipe, first, back, ratio] = fields;
            writeln!(
                page,
                "{:<38} {mib:>5} {read:>8} {copy:>8} {pipe:>8} {first:>8} {back:>8} {ratio:>8}",
                outcome.name
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &str, figures: Vec<Value>) -> Outcome {
        let name = name.to_owned();
        Outcome { name, seconds: 1.0, failed: None, not_run: None, figures, tests: Vec::new() }
    }

    fn copy(way: &str, piece: u64, rate: f64) -> Value {
        json!({ "figure": "copy", "way": way, "direction": "to device", "piece_bytes": piece, "bytes_per_second": rate })
    }

    fn judged(musts: &[Value], what: &str) -> String {
        let must = musts.iter().find(|must| text(&must["must"]).contains(what));
        must.map(|must| text(&must["judged"])).unwrap_or_default()
    }

    #[test]
    fn a_must_is_judged_by_the_best_way_beside_the_bare_loop_and_is_not_known_without_a_step() {
        let mut figures = vec![copy("bare", MIB, 50e9), copy("each", MIB, 40e9), copy("kernel", MIB, 46e9)];
        for piece in SMALL {
            figures.extend([copy("bare", piece, 5e9), copy("kernel", piece, 20e9)]);
        }
        let all = [outcome("copies by size of pieces", figures)];
        let found = musts(&all, false);
        assert_eq!(judged(&found, "pieces of 1 MiB"), "holds");
        assert_eq!(
            judged(&found, "pieces of 8 KiB"),
            "DOES NOT HOLD",
            "four times the loop, and 0.4 of the link"
        );
        assert_eq!(judged(&found, "device tests that fail"), "not known");
        assert_eq!(judged(&found, "pipeline_ratio"), "not known");
        assert_eq!(judged(&musts(&all, true), "pieces of 1 MiB"), "not known", "nothing was moved");
    }

    #[test]
    fn layers_are_judged_by_their_ratio_their_first_and_their_bytes() {
        let row = json!({
            "pipeline_ratio": 0.96, "first_layer_ms": 3.0, "first_ms": 2.0, "copy_ms": 32.0, "layers": 32,
            "bytes_right": true, "back_right": false,
        });
        let name = format!("layers {} tp{}", SHAPES[0].0, SHAPES[0].1);
        let all = [outcome(&name, vec![json!({ "models": [row] })])];
        let found = musts(&all, false);
        let judged = |what: &str| judged(&found, &format!("{name}: {what}"));
        assert_eq!(
            (judged("pipeline_ratio"), judged("first layer")),
            ("holds".to_owned(), "holds".to_owned())
        );
        assert_eq!(
            (judged("every byte"), judged("what left")),
            ("holds".to_owned(), "DOES NOT HOLD".to_owned())
        );
    }
}
