//! `kvarts gpu`: what devices there are and how pieces of memory reach them best.

use std::io::Write;
use std::sync::Arc;

use clap::{Args, Subcommand};
use kvarts_contract::buffers::SharedBuf;
use kvarts_gpudirect::cufile::{self, Wish};
use kvarts_gpudirect::device::{Batch, Device, Direction, Method, Piece, cuda, drain};
use kvarts_gpudirect::error::DeviceError;
use kvarts_gpudirect::gather::{Curve, Point};
use kvarts_gpudirect::pace::RealPace;
use serde_json::{Value, json};

use kvarts_gpudirect::device::name::DeviceName;
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// The arguments of `gpu`.
#[derive(Args, Debug)]
pub(crate) struct GpuArgs {
    #[command(subcommand)]
    command: GpuCommand,
}

#[derive(Subcommand, Debug)]
enum GpuCommand {
    /// Describe a device, measure copies with pieces of several sizes, and choose the mode of cuFile
    Probe(ProbeArgs),
}

#[derive(Args, Debug)]
struct ProbeArgs {
    /// emulated or cuda:N [default: cuda:0 if it exists, otherwise emulated]
    #[arg(long)]
    device: Option<DeviceName>,
    /// Path from files to the device: auto, direct, compatibility or staging
    #[arg(long, default_value = "auto")]
    cufile: Wish,
    /// Size of each measurement, in MiB
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096))]
    mib: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs one of the subcommands.
pub(crate) fn run(arguments: &GpuArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.command {
        GpuCommand::Probe(arguments) => probe(arguments, out),
    }
}

fn probe(arguments: &ProbeArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let found = cuda::count();
    let cuda = match &found {
        Ok(count) => format!("{count}"),
        Err(error) => error.to_string(),
    };
    let chosen = if found.is_ok() { DeviceName::Cuda(0) } else { DeviceName::Emulated };
    let device = arguments.device.unwrap_or(chosen).open().map_err(Failure::user)?.device();
    let machine = cufile::look(found.map(drop).map_err(|error| error.to_string()));
    let decision = cufile::decide(&machine, arguments.cufile).map_err(Failure::User)?;
    let bytes = arguments.mib << 20;
    let (region, host) = Curve::scratch(bytes).map_err(Failure::user)?;
    let pinned = device.pin(&region);
    let curve = Curve::measure(&*device, &*RealPace::new(), &host, bytes, 3);
    if pinned.is_ok() {
        device.unpin(&region);
    }
    let curve = curve.map_err(Failure::user)?;
    let digests = match try_digests(&*device, &host) {
        Ok(true) => "right".to_owned(),
        Ok(false) => "WRONG: report this defect".to_owned(),
        Err(error) => format!("none: {error}"),
    };
    let pinned = pinned.map_err(|error| error.to_string());
    let facts = Facts { cuda, device, pinned, decision, curve, digests };
    if arguments.json { facts.json(out) } else { facts.text(out) }
}

/// Whether the device's digests of chunks of many lengths and alignments are those of the processor.
fn try_digests(device: &dyn Device, host: &SharedBuf) -> Result<bool, DeviceError> {
    let bytes = (host.len() as u64).min(1 << 20);
    let memories = [device.allocate(bytes)?];
    let stream = device.stream()?;
    let pieces = [Piece { memory: 0, at: 0, host: 0, len: bytes }];
    let (direction, method) = (Direction::ToDevice, Method::Each);
    device.copy(&stream, &Batch { direction, method, host, memories: &memories, pieces: &pieces })?;
    drain(device, &stream)?;
    let lens = [0, 1, 3, 4, 5, 1023, 1024, 4096, 65_537, 700_000];
    let chunks: Vec<(u64, u64)> = lens
        .iter()
        .flat_map(|&len| (0..4).map(move |skew| (skew, len)))
        .filter(|one| one.0 + one.1 <= bytes)
        .collect();
    let found = device.digests(&memories[0], &chunks)?;
    let right = |(&(at, len), &digest): (&(u64, u64), &u32)| {
        host.digest(at as usize, len as usize, crc32fast::hash) == digest
    };
    Ok(found.len() == chunks.len() && chunks.iter().zip(&found).all(right))
}

struct Facts {
    cuda: String,
    device: Arc<dyn Device>,
    pinned: Result<(), String>,
    decision: cufile::Decision,
    curve: Curve,
    /// What its digests are.
    digests: String,
}

impl Facts {
    /// Whether pieces of this size go by this way.
    fn is_used(&self, point: &Point) -> bool {
        self.curve.best(point.piece_bytes) == point.method
    }

    fn json(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let about = self.device.describe();
        let point = |point: &Point| {
            json!({
                "piece_bytes": point.piece_bytes,
                "method": point.method.name(),
                "bytes_per_second": point.bytes_per_second.round(),
                "used": self.is_used(point),
            })
        };
        let found: Value = json!({
            "cuda": self.cuda,
            "device": about.kind,
            "name": about.name,
            "memory_bytes": about.memory_bytes,
            "notes": about.notes,
            "pinned": self.pinned.is_ok(),
            "pin_note": self.pinned.as_ref().err(),
            "files": {
                "mode": self.decision.mode.name(),
                "offered": self.decision.offered.name(),
                "reason": self.decision.reason,
            },
            "device_digests": self.digests,
            "curve": self.curve.points().iter().map(point).collect::<Vec<_>>(),
        });
        serde_json::to_writer_pretty(&mut *out, &found).map_err(std::io::Error::from)?;
        Ok(writeln!(out)?)
    }

    fn text(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let about = self.device.describe();
        writeln!(out, "CUDA devices: {}", self.cuda)?;
        writeln!(out, "device: {} ({})", about.kind, about.name)?;
        about.notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))?;
        if let Err(why) = &self.pinned {
            writeln!(out, "note: {why}")?;
        }
        writeln!(out, "{}", self.decision)?;
        writeln!(out, "digests on the device: {}", self.digests)?;
        let columns = [
            ("PIECE BYTES", Align::Right),
            ("METHOD", Align::Left),
            ("MB/S", Align::Right),
            ("USED", Align::Left),
        ];
        let mut table = Table::new(&columns);
        for point in self.curve.points() {
            let rate = format!("{:.0}", point.bytes_per_second / 1e6);
            let used = if self.is_used(point) { "yes" } else { "" };
            table.row([point.piece_bytes.to_string(), point.method.name().to_owned(), rate, used.to_owned()]);
        }
        Ok(write!(out, "{table}")?)
    }
}
