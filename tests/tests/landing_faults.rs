//! R25: a device that fails in every way, on the way there and back: right bytes or an error, the host's path still open,
//! and nothing registered or held at the end.
//!
//! `KVARTS_SEEDS=n` runs n rounds of each kind instead of the few that every build runs; a failure prints its round.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

mod landed;

use std::sync::Arc;
use std::time::Duration;

use kvarts_gpudirect::Arena;
use kvarts_gpudirect::device::emulated::{Emulated, Faults, Model};
use kvarts_gpudirect::device::{Device, InUse};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::gather::Curve;
use kvarts_gpudirect::pace::ModelPace;
use kvarts_gpudirect::pipeline::Pipeline;
use kvarts_store::api::{BlockOutcome, KvStore, Order, Placed, Presence, ReadEvent, ReadRequest, Verify};
use kvarts_store::rt::Class;
use kvarts_store::rt::blocking::block_on;
use kvarts_tests::fixture;
use kvarts_tests::sim::{Rng, Seed};

use landed::{BLOCKS, COLUMNS, Pool, Site, is_here, run, store_request};

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

fn rounds() -> u64 {
    std::env::var("KVARTS_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6)
}

fn until(done: impl Fn() -> bool) {
    while !done() {
        std::thread::yield_now();
    }
}

/// A device with one fault in one of its first copies. No time passes but what is waited for.
fn device(kind: Kind, rng: &mut Rng) -> (Emulated, u64) {
    let at = rng.below(3);
    let is = |one: Kind| (kind == one).then_some(at);
    let faults = Faults {
        no_pin: kind == Kind::Registration,
        partial_copy: is(Kind::Partial),
        lost_at_copy: is(Kind::Lost),
        stuck_copy: is(Kind::Stuck),
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
        Kind::Stuck => pipeline.with_copy_patience(Duration::from_millis(5)),
        _ => pipeline,
    }
}

/// The way to the device.
fn there(site: &Site, kind: Kind, rng: &mut Rng) {
    let (device, at) = device(kind, rng);
    let pool = Pool::new(&device, COLUMNS[0]);
    let layers = pool.shape.layers().len() as u32;
    {
        let pipeline = pipeline(site, &device, &site.arena, kind);
        let compute = device.stream().unwrap();
        let _freed = Freed(&device);
        let mut stream = site.land(&pipeline, &pool).unwrap();
        let (_, end) = run(&mut stream, &pool, &device, &compute);
        match (&end.reason, kind) {
            (None, Kind::Registration) => assert_eq!(end.usable_layers, layers),
            (Some(EndReason::Device(error)), _) => {
                assert!(is_told(kind, error), "{error:?}");
                let expected = if kind == Kind::Misaligned { 0 } else { at as u32 };
                // A busy machine may call an earlier copy stuck; and a device may be lost before anybody asked it how an
                // earlier copy ended, which then is lost as well.
                let fewer = matches!(kind, Kind::Stuck | Kind::Lost) && end.usable_layers < expected;
                assert!(end.usable_layers == expected || fewer, "{end:?}");
            }
            (other, _) => panic!("{other:?}"),
        }
        (0..end.usable_layers)
            .for_each(|layer| assert!(pool.is_there(site, &device, layer), "layer {layer}"));
        drop(stream);
        rescue(&device, rng);
    }
    site.settle();
    drop(pool);
    until(|| device.in_use() == InUse::default());
}

/// The way back.
fn back(site: &Site, kind: Kind, rng: &mut Rng, chain: u64) {
    let (device, _) = device(kind, rng);
    let arena = Arena::new(if rng.coin() { 128 << 10 } else { 1 << 20 }).unwrap();
    let pool = Pool::new(&device, COLUMNS[0]);
    let request = store_request(site, &pool, chain);
    let keys = request.keys.clone();
    {
        let pipeline = pipeline(site, &device, &arena, kind);
        let pinned = arena.pin(pipeline.device());
        assert_eq!(pinned.is_err(), kind == Kind::Registration);
        let compute = device.stream().unwrap();
        let _freed = Freed(&device);
        let mut sink = pipeline.store_layers(request).unwrap();
        let layers = 0..pool.shape.layers().len() as u32;
        let taken = layers.map(|layer| sink.store_layer(layer, &compute)).collect::<Result<Vec<_>, _>>();
        match taken.and_then(|_| sink.seal()) {
            Ok(answer) => {
                assert_eq!(kind, Kind::Registration);
                let reply = block_on(answer).unwrap().unwrap();
                assert!(reply.outcomes.iter().all(|one| *one == BlockOutcome::Stored), "{reply:?}");
            }
            Err(LandError::Device(error)) => assert!(is_told(kind, &error), "{error:?}"),
            Err(other) => panic!("{other:?}"),
        }
        rescue(&device, rng);
    }
    let wanted = if kind == Kind::Registration { Presence::Here } else { Presence::Absent };
    until(|| is_here(site, &pool, &keys).iter().all(|one| *one == wanted));
    until(|| arena.usage().used == 0);
    drop((arena, pool));
    until(|| device.in_use() == InUse::default());
}

/// The host's path, which no device can harm.
fn host(site: &Site) {
    let (group, coordinate) = COLUMNS[0];
    let shape = fixture::shape(group, coordinate);
    let into = fixture::place(&shape, BLOCKS, fixture::Style::Blocks, 0).unwrap();
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
    let read = read.unwrap();
    let end = loop {
        if let ReadEvent::End(end) = block_on(read.next()) {
            break end;
        }
    };
    assert_eq!((end.usable_blocks, end.failures.len()), (BLOCKS, 0));
    for (block, key) in (0..).zip(&site.keys) {
        assert_eq!(
            fixture::read_block(&into, block, &shape),
            fixture::content(key, group, coordinate, 1, &shape)
        );
    }
}

#[test]
fn a_device_that_fails_in_any_way_gives_right_bytes_or_an_error_and_leaves_nothing_held() {
    for kind in KINDS {
        // A new store now and then, so that none is full.
        for first in (0..rounds()).step_by(100) {
            some_rounds(kind, first..rounds().min(first + 100));
        }
    }
}

fn some_rounds(kind: Kind, rounds: std::ops::Range<u64>) {
    let site = Site::new("faults");
    for round in rounds {
        let mut rng = Seed(round).child("r25").rng();
        println!("{kind:?}, round {round}");
        there(&site, kind, &mut rng);
        back(&site, kind, &mut rng, 1000 + round);
        host(&site);
    }
    assert_eq!(site.arena.usage().used, 0);
}
