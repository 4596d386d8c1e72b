//! `bench encoded`: two prefixes of equal bytes in one store, one of them encoded by compaction: what that saves on disk
//! and what it costs a cold read, layer by layer, every digest checked.
//!
//! The bytes are those of a model's state in 16 bits, made up: normal numbers of a scale for each channel, rounded to
//! bf16. What real state gives depends on the model; `--noise` gives what cannot be compressed.

use std::io::Write;
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_contract::api::{
    ContainsRequest, KvStore, LeaseTerms, Order, Placed, ReadEvent, ReadRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_layout::BlockKey;
use kvarts_store::engine::{CompactOptions, Options, Store};

use super::pairs::{Sample, cpu_seconds, take_turns};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, Subject, expect_stored, key, mix};
use kvarts_terminal::Failure;

const MIB: f64 = (1u64 << 20) as f64;
/// The most bytes of a segment: small ones, so that those of both prefixes are sealed.
const SEGMENT_BYTES: u64 = 64 << 20;
/// Values of one channel that follow each other have one scale.
const CHANNELS: usize = 128;

/// The arguments of `bench encoded`.
#[derive(Args, Debug)]
pub(super) struct EncodedArgs {
    #[command(flatten)]
    common: Common,
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Size of each of the two prefixes in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    mib: u64,
    /// Use bytes that cannot be compressed
    #[arg(long)]
    noise: bool,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &EncodedArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let spec = setup::model(&arguments.model)?;
    let budget_bytes = (arguments.mib << 20) * 4 + (2 << 30);
    let scratch = Scratch::new(common, budget_bytes)?;
    let segment_bytes = ((arguments.mib << 20) / 4).clamp(2 << 20, SEGMENT_BYTES);
    let record_bytes_max = (8 << 20).min(segment_bytes / 2);
    let options = Options { budget_bytes, segment_bytes, record_bytes_max, ..Options::default() };
    let home = setup::open(common, scratch.path(), options)?;
    let store = home.store();
    let subject = Subject::new(store, &spec, None)?;
    let blocks = ((arguments.mib << 20) / subject.shape.block_bytes()).max(1);
    let memory = if arguments.noise { None } else { Some(state(subject.shape.block_bytes() as usize * 8)?) };
    let series = |series| (0..blocks).map(|number| key(series, number)).collect::<Vec<BlockKey>>();
    let (raw, encoded, behind) = (series(1), series(2), series(3));
    for keys in [&raw, &encoded, &behind] {
        fill(store, &subject, keys, memory.as_ref())?;
    }
    // What is leased is not cold; the last prefix only seals the segments of the others.
    for keys in [&raw, &behind] {
        hold(store, &subject, keys)?;
    }
    let options = CompactOptions {
        merge_records_min: 0,
        dead_thousandths: 1000,
        encode_cold_after: Some(Duration::ZERO),
        ..CompactOptions::default()
    };
    let begun = Instant::now();
    let done = block_on(store.compact(options)).map_err(Failure::user)?;
    let seconds = begun.elapsed().as_secs_f64();
    if done.records_encoded == 0 && !arguments.noise {
        return Err(Failure::user(
            "no record was encoded, so there is nothing to compare: use a larger --mib",
        ));
    }
    let requests = [request(&subject, &raw)?, request(&subject, &encoded)?];
    let [first, second] = &requests;
    let contestants: Vec<super::pairs::Contestant<'_>> = vec![
        ("raw", Box::new(|| read(store, first))),
        ("encoded", Box::new(|| read(store, second))),
        ("again", Box::new(|| read(store, first))),
    ];
    let rounds = take_turns(common.pairs, contestants)?;
    let mut report = Report::new("encoded");
    setup::describe(&mut report, common, &home)?;
    report.fact("model", subject.name.clone());
    report.fact("blocks", blocks);
    report.fact("noise", arguments.noise);
    report.fact("records_encoded", done.records_encoded);
    report.fact("bytes_before", done.encoded_bytes_before);
    report.fact("bytes_after", done.encoded_bytes_after);
    let gain = done.encoded_bytes_before as f64 / done.encoded_bytes_after.max(1) as f64;
    report.fact("size_ratio", if done.records_encoded == 0 { 1.0 } else { gain });
    report.fact("encoding_mib_s", done.encoded_bytes_before as f64 / MIB / seconds);
    let bytes = (blocks * subject.shape.block_bytes()) as f64 / MIB;
    report.median("raw_mib_s", rounds.figure("raw", |sample| bytes / sample.seconds));
    report.median("encoded_mib_s", rounds.figure("encoded", |sample| bytes / sample.seconds));
    report.median("speed_ratio", rounds.speed("encoded", "raw"));
    report.median("first_layer_ratio", rounds.paired("encoded", "raw", |a, b| a.first / b.first));
    report.control("control", rounds.speed("again", "raw"));
    drop(rounds);
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}

fn fill(
    store: &Store,
    subject: &Subject,
    keys: &[BlockKey],
    memory: Option<&SharedBuf>,
) -> Result<(), Failure> {
    let Some(memory) = memory else { return subject.fill(store, keys, 8, None) };
    for keys in keys.chunks(8) {
        let len = subject.shape.block_bytes() as usize * keys.len();
        let from = memory
            .slice(0, len)
            .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a put"))?;
        let request = subject.put(keys.to_vec(), kvarts_contract::api::Parent::Root, from, None)?;
        expect_stored(&block_on(store.put(request)))?;
    }
    Ok(())
}

fn hold(store: &Store, subject: &Subject, keys: &[BlockKey]) -> Result<(), Failure> {
    for keys in keys.chunks(1024) {
        let lease = LeaseTerms { hold: Duration::from_secs(3600), tenant: 1, cap_bytes: u64::MAX };
        let Subject { namespace, group, coordinate, .. } = *subject;
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: Some(lease) };
        store.contains(&request).map_err(Failure::user)?;
    }
    Ok(())
}

fn request(subject: &Subject, keys: &[BlockKey]) -> Result<ReadRequest, Failure> {
    let blocks = keys.len() as u32;
    let buffers = subject.shape.layers().iter().map(|layer| {
        let buffer = setup::memory((layer.bytes() * u64::from(blocks)) as usize)?;
        // Touched once, or the first pass would pay for the pages.
        buffer.fill(0);
        Ok(buffer)
    });
    let buffers = buffers.collect::<Result<Vec<_>, Failure>>()?;
    Ok(ReadRequest {
        namespace: subject.namespace,
        group: subject.group,
        coordinate: subject.coordinate,
        keys: keys.to_vec(),
        layers: None,
        order: Order::Layers,
        into: Placed::layers(&subject.shape, buffers, blocks).map_err(Failure::user)?,
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    })
}

fn read(store: &Store, request: &ReadRequest) -> Result<Sample, Failure> {
    block_on(store.forget_headers()).map_err(Failure::user)?;
    let (cpu, begin, mut first) = (cpu_seconds(), Instant::now(), 0.0);
    let stream = store.read(request.clone()).map_err(Failure::user)?;
    let end = loop {
        match stream.next_blocking() {
            ReadEvent::Layer { layer: 0, .. } => first = begin.elapsed().as_secs_f64(),
            ReadEvent::End(end) => break end,
            _ => {}
        }
    };
    let seconds = begin.elapsed().as_secs_f64();
    if let Some((block, reason)) = end.failures.first() {
        return Err(Failure::User(format!("block {block} was not read: {reason}")));
    }
    Ok(Sample { seconds, cpu: cpu_seconds() - cpu, first })
}

/// Normal numbers in bf16, each channel with a scale of its own.
fn state(len: usize) -> Result<SharedBuf, Failure> {
    let buf = setup::memory(len)?;
    let (mut seed, mut page) = (7, vec![0u8; 1 << 16]);
    let mut uniform = || (mix(&mut seed) >> 40) as f32 / (1u32 << 24) as f32;
    let scales: Vec<f32> = (0..CHANNELS).map(|_| 0.25 + 2.0 * uniform()).collect();
    for at in (0..len).step_by(page.len()) {
        for (pair, scale) in page.chunks_exact_mut(2).zip(scales.iter().cycle()) {
            let normal = (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
            pair.copy_from_slice(&((normal * scale).to_bits() >> 16).to_le_bytes()[..2]);
        }
        let here = page.len().min(len - at);
        buf.copy_in(at, &page[..here]);
    }
    Ok(buf)
}
