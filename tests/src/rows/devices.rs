//! A device that fails in every way, on the way there and back: right bytes or an error, the host's path still open, and
//! nothing registered or held at the end. The device is the emulated one; the store, its threads and its disk are real.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, KvStore, Order, Placed, Presence, ReadEvent, ReadRequest, Verify};
use kvarts_contract::blocking::block_on;
use kvarts_contract::class::Class;
use kvarts_gpudirect::device::emulated::{Emulated, Faults, Model};
use kvarts_gpudirect::device::{Device, InUse};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::gather::Curve;
use kvarts_gpudirect::pace::ModelPace;
use kvarts_gpudirect::pipeline::Pipeline;
use kvarts_gpudirect::{Arena, DeviceArena};

use super::pool::{States, until};
use super::{Row, Tally};
use crate::fixture;
use crate::landed::{self, BLOCKS, COLUMNS, Pool, Site, is_here, run, store_request};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed};

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Host memory cannot be pinned: it works, only slower.
    Registration,
    /// A copy moves half of its bytes.
    Partial,
    /// The device is lost in the middle of a copy.
    Lost,
    /// An address that the device cannot take.
    Misaligned,
    /// A copy that does not end.
    Stuck,
}

const KINDS: [Kind; 5] = [Kind::Registration, Kind::Partial, Kind::Lost, Kind::Misaligned, Kind::Stuck];
/// Rounds of each kind in one store.
const ROUNDS: u64 = 4;

/// A device with one fault in one of its first copies. No time passes but what is waited for.
fn device(kind: Kind, rng: &mut Rng) -> (Emulated, u64) {
    let at = rng.below(3);
    let is = |one: Kind| (kind == one).then_some(at);
    let faults = Faults {
        no_pin: kind == Kind::Registration,
        partial_copy: is(Kind::Partial),
        lost_at_copy: is(Kind::Lost),
        stuck_copy: is(Kind::Stuck),
        // No caller is told of a failed read of a file: its layers come through the arena.
        failed_read: rng.coin().then(|| rng.below(4)),
        garbled_read: rng.coin().then(|| rng.below(4)),
        ..Faults::default()
    };
    let align = if kind == Kind::Misaligned { 16 } else { 1 };
    let model = Model { strict: true, align, ..Model::default() };
    (Emulated::with(model, faults, Arc::new(ModelPace::default())), at)
}

/// Lets a stuck copy end, one way or the other.
fn rescue(device: &Emulated, rng: &mut Rng) {
    if rng.coin() { device.unstick() } else { device.declare_lost("it does not answer") }
}

/// Whether this is how a copy of such a device ends.
fn is_told(kind: Kind, error: &DeviceError) -> bool {
    match kind {
        Kind::Registration => false,
        Kind::Partial => matches!(error, DeviceError::Partial { .. }),
        Kind::Lost => matches!(error, DeviceError::Lost(_)),
        Kind::Misaligned => matches!(error, DeviceError::Misaligned { align: 16, .. }),
        Kind::Stuck => matches!(error, DeviceError::Stuck { .. }),
    }
}

/// Lets a stuck copy end when a round does, also where that fails: its thread would never end.
struct Freed<'a>(&'a Emulated);

impl Drop for Freed<'_> {
    fn drop(&mut self) {
        self.0.unstick();
    }
}

fn pipeline(site: &Site, device: &Emulated, arena: &Arena, kind: Kind) -> Pipeline {
    let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
    let shared: Arc<dyn Device> = Arc::new(device.clone());
    let pipeline = Pipeline::new(store, shared, arena.clone(), Curve::default());
    match kind {
        Kind::Stuck => pipeline.with_copy_timeout(Duration::from_millis(5)),
        _ => pipeline,
    }
}

/// What a round does to whatever of it fails.
fn text(error: impl std::fmt::Debug) -> String {
    format!("{error:?}")
}

/// The way to the device; gives how many layers were usable.
fn there(site: &Site, kind: Kind, rng: &mut Rng) -> Result<u32, String> {
    let (device, at) = device(kind, rng);
    let pool = Pool::new(&device, COLUMNS[0]);
    let layers = pool.shape.layers().len() as u32;
    let usable = {
        let mut pipeline = pipeline(site, &device, &site.arena, kind);
        if rng.coin() {
            let arena = DeviceArena::new(pipeline.device(), 256 << 10).map_err(text)?;
            pipeline = pipeline.with_files(site.store().clone(), arena);
        }
        let compute = device.stream().map_err(text)?;
        let _freed = Freed(&device);
        let mut stream = site.land(&pipeline, &pool).map_err(text)?;
        let (_, end) = run(&mut stream, &pool, &device, &compute);
        match (&end.reason, kind) {
            (None, Kind::Registration) if end.usable_layers == layers => {}
            (Some(EndReason::Device(error)), _) if is_told(kind, error) => {
                let expected = if kind == Kind::Misaligned { 0 } else { at as u32 };
                // A busy machine may call an earlier copy stuck. And a device may be lost before it was asked how an
                // earlier copy ended: then that copy is lost as well.
                let fewer = matches!(kind, Kind::Stuck | Kind::Lost) && end.usable_layers < expected;
                if end.usable_layers != expected && !fewer {
                    return Err(format!("{expected} layers are usable at most: {end:?}"));
                }
            }
            _ => return Err(format!("not how this device fails: {end:?}")),
        }
        let wrong = (0..end.usable_layers).find(|layer| !pool.is_there(site, &device, *layer));
        if let Some(layer) = wrong {
            return Err(format!("other bytes in layer {layer}"));
        }
        drop(stream);
        rescue(&device, rng);
        end.usable_layers
    };
    site.settle();
    drop(pool);
    landed::until("the device is let go of", || device.in_use() == InUse::default());
    Ok(usable)
}

/// The way back; true if the blocks were stored.
fn back(site: &Site, kind: Kind, rng: &mut Rng, chain: u64) -> Result<bool, String> {
    let (device, _) = device(kind, rng);
    let arena = Arena::new(if rng.coin() { 128 << 10 } else { 1 << 20 }).map_err(text)?;
    let pool = Pool::new(&device, COLUMNS[0]);
    let request = store_request(site, &pool, chain);
    let keys = request.keys.clone();
    let stored = {
        let pipeline = pipeline(site, &device, &arena, kind);
        let pinned = arena.pin(pipeline.device());
        if pinned.is_err() != (kind == Kind::Registration) {
            return Err(format!("pinned: {pinned:?}"));
        }
        let compute = device.stream().map_err(text)?;
        let _freed = Freed(&device);
        let mut sink = pipeline.store_layers(request).map_err(text)?;
        let layers = 0..pool.shape.layers().len() as u32;
        let taken = layers.map(|layer| sink.store_layer(layer, &compute)).collect::<Result<Vec<_>, _>>();
        let stored = match taken.and_then(|_| sink.seal()) {
            Ok(answer) if kind == Kind::Registration => {
                let reply = block_on(answer).map_err(text)?.map_err(text)?;
                if reply.outcomes.iter().any(|one| *one != BlockOutcome::Stored) {
                    return Err(text(reply));
                }
                true
            }
            Err(LandError::Device(error)) if is_told(kind, &error) => false,
            Ok(_) => return Err("what never left the device was taken".to_owned()),
            Err(other) => return Err(format!("not how this device fails: {other:?}")),
        };
        rescue(&device, rng);
        stored
    };
    let wanted = if stored { Presence::Here } else { Presence::Absent };
    landed::until("a put is whole or absent", || {
        is_here(site, &pool, &keys).iter().all(|one| *one == wanted)
    });
    landed::until("the arena is free", || arena.usage().used == 0);
    drop((arena, pool));
    landed::until("the device is let go of", || device.in_use() == InUse::default());
    Ok(stored)
}

/// The host's path, which no device can harm.
fn host(site: &Site) -> Result<(), String> {
    let (group, coordinate) = COLUMNS[0];
    let shape = fixture::shape(group, coordinate);
    let into = fixture::place(&shape, BLOCKS, fixture::Style::Blocks, 0).map_err(text)?;
    let read = site.store().read(ReadRequest {
        namespace: site.namespace,
        group,
        coordinate,
        keys: site.keys.clone(),
        layers: None,
        order: Order::Blocks,
        into: Placed::clone(&into),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    });
    let read = read.map_err(text)?;
    let end = loop {
        if let ReadEvent::End(end) = block_on(read.next()) {
            break end;
        }
    };
    if (end.usable_blocks, end.failures.len()) != (BLOCKS, 0) {
        return Err(format!("the host's path: {end:?}"));
    }
    let of = |block, key| {
        fixture::read_block(&into, block, &shape) == fixture::content(key, group, coordinate, 1, &shape)
    };
    match (0..).zip(&site.keys).find(|(block, key)| !of(*block, *key)) {
        Some((block, _)) => Err(format!("the host's path: other bytes in block {block}")),
        None => Ok(()),
    }
}

fn fails(seed: Seed, states: &States) -> Result<(), String> {
    let site = Site::new("devices");
    for round in 0..ROUNDS {
        for kind in KINDS {
            let mut rng = seed.child("devices").nth(round * KINDS.len() as u64 + kind as u64).rng();
            let note = |what: String| format!("{kind:?}, round {round}: {what}");
            let usable = there(&site, kind, &mut rng).map_err(|what| note(format!("there: {what}")))?;
            let chain = 1000 + round * KINDS.len() as u64 + kind as u64;
            let stored = back(&site, kind, &mut rng, chain).map_err(|what| note(format!("back: {what}")))?;
            host(&site).map_err(note)?;
            let mut state = Mixer::new(kind as u64);
            [seed.0, round, u64::from(usable), u64::from(stored)].iter().for_each(|word| state.word(*word));
            states.reach(state.value());
        }
    }
    match site.arena.usage().used {
        0 => Ok(()),
        held => Err(format!("{held} bytes of the arena are held")),
    }
}

/// Row R25.
pub(super) fn row() -> Row {
    Row {
        id: "R25",
        what: "an emulated device fails: no pinning, half a copy, lost, misaligned, stuck, files misread; layers there and back",
        counts: "failures of five kinds, each on the way there and on the way back",
        // A thousand of each kind at night.
        targets: [100, 5_000, 50_000],
        run: |ask, target| -> Tally { until(ask, target, fails) },
    }
}
