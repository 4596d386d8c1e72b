//! `bench crossover`: from which size of a layer's chunk on, full-block layout is read layer by layer as fast as
//! layer-block layout.
//!
//! It decides what `layout=auto` takes. Records are of 16 MiB and blocks of 16 layers, so that one layer of a record
//! in layer-block layout is one longest device read, whatever the chunk's size; what changes with it is how many
//! device reads a layer takes in full-block layout.

use std::io::Write;

use clap::Args;
use kvarts_contract::api::Verify;
use kvarts_layout::arrange::AUTO_FULL_BLOCK_BYTES;
use kvarts_layout::{BlockKey, Layout, ModelSpec};
use kvarts_store::engine::Options;
use serde_json::{Value, json};

use super::bare::Bare;
use super::layers::Race;
use super::pairs::{Contestant, Summary, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, key};
use kvarts_terminal::Failure;

const LAYERS: u64 = 16;
const RECORD_BYTES: u64 = 16 << 20;
const TOKENS: u64 = 16;
/// Full-block counts as no slower from this share of layer-block's rate on: below lies the noise of a paired run.
const AS_FAST: f64 = 0.97;

/// The arguments of `bench crossover`.
#[derive(Args, Debug)]
pub(super) struct CrossoverArgs {
    #[command(flatten)]
    common: Common,
    /// Sizes of one layer of one block in KiB to measure, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8, 16, 32, 64, 128, 256, 512])]
    chunk_kib: Vec<u64>,
    /// Size of each prefix in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    mib: u64,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &CrossoverArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    if let Some(kib) = arguments.chunk_kib.iter().find(|kib| !(1..=512).contains(*kib)) {
        return Err(Failure::User(format!(
            "--chunk-kib {kib}: use 1 to 512, because a record must have space for two blocks"
        )));
    }
    let bytes = (arguments.mib << 20) * 2 * arguments.chunk_kib.len() as u64;
    let scratch = Scratch::new(common, bytes + (2 << 30))?;
    let options =
        Options { budget_bytes: bytes + (2 << 30), record_bytes_max: RECORD_BYTES, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let mut report = Report::new("crossover");
    setup::describe(&mut report, common, &home)?;
    report.fact("mib", arguments.mib);
    report.fact("layers", LAYERS);
    report.fact("record_bytes", RECORD_BYTES);
    let mut rows = Vec::new();
    for &kib in &arguments.chunk_kib {
        let row = size(arguments, &home, scratch.path(), kib << 10)?;
        report.note(draw(&row));
        rows.push(row);
    }
    let crossover = crossover(&rows);
    report.fact("crossover_bytes", crossover.map(|row| row.chunk_bytes));
    report.fact("auto_full_block_bytes", AUTO_FULL_BLOCK_BYTES);
    let control = super::pairs::summary(rows.iter().map(|row| row.control.median).collect());
    report.control("control", control);
    report.rows("sizes", rows.iter().map(Row::json).collect());
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

/// What was found for one size.
#[derive(Debug)]
struct Row {
    chunk_bytes: u64,
    full_mib_s: Summary,
    layer_mib_s: Summary,
    ratio: Summary,
    control: Summary,
    cpu_ratio: Summary,
}

impl Row {
    fn json(&self) -> Value {
        json!({
            "chunk_bytes": self.chunk_bytes,
            "full_block_mib_s": self.full_mib_s,
            "layer_block_mib_s": self.layer_mib_s,
            "ratio": self.ratio,
            "cpu_ratio": self.cpu_ratio,
            "control": self.control,
        })
    }
}

fn size(
    arguments: &CrossoverArgs,
    home: &kvarts_store::home::Home,
    directory: &std::path::Path,
    chunk_bytes: u64,
) -> Result<Row, Failure> {
    let common = &arguments.common;
    let store = home.store();
    let spec = spec(chunk_bytes)?;
    let subject = Subject::new(store, &spec, None)?;
    let blocks = ((arguments.mib << 20) / subject.shape.block_bytes()).max(1);
    let in_record = (RECORD_BYTES / subject.shape.block_bytes()).max(1) as usize;
    let lanes = usize::from(common.executors);
    let bare = Bare::start(common, directory, lanes)?;
    let race = |layout: Layout| {
        let series = chunk_bytes * 2 + u64::from(layout == Layout::FullBlock);
        let keys: Vec<BlockKey> = (0..blocks).map(|number| key(series, number)).collect();
        subject.fill(store, &keys, in_record, Some(layout))?;
        Race::new(store, &subject, &keys, (Verify::Always, 1), (&bare, lanes))
    };
    let (full, layer) = (race(Layout::FullBlock)?, race(Layout::LayerBlock)?);
    setup::progress(&format!("reading chunks of {} KiB", chunk_bytes >> 10));
    let contestants: Vec<Contestant<'_>> = vec![
        ("full", Box::new(|| full.engine(store))),
        ("layer", Box::new(|| layer.engine(store))),
        ("bare", Box::new(|| layer.bare(&bare, false))),
        ("again", Box::new(|| layer.bare(&bare, false))),
    ];
    let rounds = take_turns(common.pairs, contestants)?;
    for race in [&full, &layer] {
        race.leave(store);
    }
    setup::progress("");
    let mib = (blocks * subject.shape.block_bytes()) as f64 / f64::from(1 << 20);
    Ok(Row {
        chunk_bytes,
        full_mib_s: rounds.figure("full", |sample| mib / sample.seconds),
        layer_mib_s: rounds.figure("layer", |sample| mib / sample.seconds),
        ratio: rounds.speed("full", "layer"),
        control: rounds.speed("again", "bare"),
        cpu_ratio: rounds.paired("full", "layer", |full, layer| full.cpu / layer.cpu),
    })
}

fn spec(chunk_bytes: u64) -> Result<ModelSpec, Failure> {
    let text = format!(
        "name = \"crossover-{chunk_bytes}\"\nsource = \"kvarts bench crossover\"\nblock_tokens = {TOKENS}\n\
         layers = [{{ repeat = {LAYERS}, of = [\"full\"] }}]\n[layer]\nfull = [\"kv\"]\n[part.kv]\n\
         kind = \"dense_kv\"\nrole = \"stream\"\nbytes = {}\ndtype = \"bf16\"\nheads = 8\n",
        chunk_bytes / TOKENS
    );
    ModelSpec::parse(&text).map_err(Failure::user)
}

/// The smallest size from which on full-block is as fast.
fn crossover(rows: &[Row]) -> Option<&Row> {
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|row| std::cmp::Reverse(row.chunk_bytes));
    sorted.into_iter().take_while(|row| row.ratio.median >= AS_FAST).last()
}

/// One line of the plot: a bar of 40 characters stands for layer-block's rate.
fn draw(row: &Row) -> String {
    const WIDTH: f64 = 40.0;
    let bar = (row.ratio.median * WIDTH).round().clamp(0.0, 60.0) as usize;
    let place = WIDTH as usize;
    let mut line: Vec<char> = format!("{:<60}", "#".repeat(bar)).chars().collect();
    if let Some(mark) = line.get_mut(place) {
        *mark = '|';
    }
    let line: String = line.into_iter().collect();
    let (kib, ratio) = (row.chunk_bytes >> 10, row.ratio.median);
    format!(
        "{kib:>5} KiB {} {ratio:.2} of the {:.0} MiB/s of layer-block",
        line.trim_end(),
        row.layer_mib_s.median
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(chunk_bytes: u64, ratio: f64) -> Row {
        let at = |median| Summary { median, low: median, high: median };
        Row {
            chunk_bytes,
            full_mib_s: at(1000.0 * ratio),
            layer_mib_s: at(1000.0),
            ratio: at(ratio),
            control: at(1.0),
            cpu_ratio: at(1.0),
        }
    }

    #[test]
    fn a_size_that_is_fast_below_one_that_is_not_is_no_crossover() {
        let rows = [row(4, 1.0), row(8, 0.5), row(16, 0.98), row(32, 1.1)];
        assert_eq!(crossover(&rows).map(|row| row.chunk_bytes), Some(16));
        assert!(crossover(&[row(4, 1.0), row(8, 0.5)]).is_none());
    }

    #[test]
    fn a_bar_is_as_long_as_the_ratio_says() {
        let line = draw(&row(64 << 10, 0.5));
        assert_eq!(line.matches('#').count(), 20);
        assert!(line.starts_with("   64 KiB ") && line.contains("0.50"), "{line}");
        assert_eq!(line.chars().position(|c| c == '|'), Some(50));
    }

    #[test]
    fn the_models_of_all_sizes_are_sound() {
        for kib in [1, 4, 512] {
            let spec = spec(kib << 10).unwrap();
            let group = spec.geometry().groups()[0].group;
            let coordinate = spec.geometry().coordinate(group, 1, 0).unwrap();
            let shape = spec.geometry().shape(group, coordinate, TOKENS as u32).unwrap();
            assert_eq!(shape.block_bytes(), (kib << 10) * LAYERS);
        }
    }
}
