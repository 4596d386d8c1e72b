//! Layers landing in the memory of an emulated device: bytes, order, faults, and what is left behind.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{KvStore, Order, Placed, ReadRequest, Verify};
use kvarts_contract::class::Class;
use kvarts_contract::error::{Kind, Reason};
use kvarts_gpudirect::device::emulated::{Emulated, Faults, Model};
use kvarts_gpudirect::device::{Device, InUse, drain};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::gather::Curve;
use kvarts_gpudirect::lander::Lander;
use kvarts_gpudirect::pipeline::{LandRequest, LayerEnd, Next, Pipeline};
use kvarts_gpudirect::{Arena, Destination};
use kvarts_tests::fixture::{self, ODD, PAGES, all_heads};

use kvarts_tests::landed::{BLOCKS, COLUMNS, Freed, Pool, Site, busy_link, read_by_the_engine, run, strict};

#[test]
fn every_layer_lands_in_its_slots_before_it_is_used_and_nothing_is_left_behind() {
    let site = Site::new("whole");
    for (column, way) in COLUMNS.into_iter().flat_map(|column| Site::WAYS.map(|way| (column, way))) {
        let device = strict(Faults::default());
        {
            let pipeline = way(&site, &device, &site.arena);
            let pool = Pool::new(&device, column);
            let compute = device.stream().unwrap();
            let mut stream = site.land(&pipeline, &pool).unwrap();
            assert!(
                site.arena.usage().used < pool.shape.block_bytes() * u64::from(BLOCKS) || column.0 == ODD
            );
            let (came, end) = run(&mut stream, &pool, &device, &compute);
            let layers = pool.shape.layers().len() as u32;
            assert_eq!(came, layers);
            assert_eq!(end, LayerEnd { usable_layers: layers, usable_blocks: BLOCKS, reason: None });
            drain(&device, &compute).unwrap();
            assert_eq!(device.hazards(), 0);
            (0..layers).for_each(|layer| assert!(pool.is_there(&site, &device, layer), "layer {layer}"));
        }
        site.settle();
        assert_eq!(device.in_use(), InUse::default());
        assert_eq!(site.arena.usage().largest_free, 128 << 10);
    }
}

#[test]
fn a_range_of_layers_lands_alone_and_a_contiguous_buffer_serves_as_well() {
    for way in Site::WAYS {
        a_range_lands_alone(&way);
    }
}

fn a_range_lands_alone(way: &dyn Fn(&Site, &Emulated, &Arena) -> Pipeline) {
    let site = Site::new("range");
    let device = strict(Faults::default());
    let pipeline = way(&site, &device, &site.arena);
    let shape = Arc::new(fixture::shape(PAGES, all_heads()));
    let memory = device.allocate(shape.block_bytes() * u64::from(BLOCKS)).unwrap();
    let compute = device.stream().unwrap();
    let pool = Pool::new(&device, COLUMNS[0]);
    let into = Destination::contiguous(&shape, memory.clone(), BLOCKS).unwrap();
    let request = LandRequest { layers: Some(1..2), into, ..site.request(&pool) };
    let mut stream = pipeline.land(request).unwrap();
    assert!(matches!(stream.next_layer(&compute), Next::Layer(layer) if layer.layer == 1));
    assert!(matches!(
        stream.next_layer(&compute),
        Next::End(LayerEnd { usable_layers: 1, reason: None, .. })
    ));
    let before = shape.layers()[0].bytes() * u64::from(BLOCKS);
    assert!(
        device.peek(&memory, 0, before).unwrap().iter().all(|&byte| byte == 0),
        "layer 0 was not asked for"
    );
    let first = &fixture::content(&site.keys[0], PAGES, all_heads(), 1, &shape)[pool.parts(1).start];
    assert_eq!(&device.peek(&memory, before, first.len() as u64).unwrap(), first);
}

#[test]
fn a_damaged_layer_ends_the_stream_with_what_is_usable_and_why() {
    let site = Site::new("damaged");
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let whole = fixture::memory(pool.shape.block_bytes() * u64::from(BLOCKS), 0);
    let planned = site.store().planned_extents(&ReadRequest {
        namespace: site.namespace,
        group: PAGES,
        coordinate: all_heads(),
        keys: site.keys.clone(),
        layers: None,
        order: Order::Layers,
        into: Placed::blocks(&pool.shape, whole, BLOCKS).unwrap(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    });
    let extent = planned.unwrap().into_iter().find(|extent| extent.step == 2).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(site.path().join(&extent.path)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, extent.offset + 7).unwrap();
    file.write_all_at(&[byte[0] ^ 4], extent.offset + 7).unwrap();
    let pipeline = site.pipeline(&device);
    let compute = device.stream().unwrap();
    let mut stream = site.land(&pipeline, &pool).unwrap();
    let (came, end) = run(&mut stream, &pool, &device, &compute);
    assert!(came <= 2 && end.usable_layers == came, "{end:?}");
    assert!(matches!(&end.reason, Some(EndReason::Store(Reason::Digest { .. }))), "{end:?}");
    assert_eq!(end.reason.unwrap().kind(), Kind::Corrupt);
    (0..came).for_each(|layer| assert!(pool.is_there(&site, &device, layer)));
    drop(stream);
    site.settle();
}

#[test]
fn a_block_that_is_not_here_and_a_deadline_are_told_as_such() {
    let site = Site::new("absent");
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let pipeline = site.pipeline(&device);
    let compute = device.stream().unwrap();
    let absent = fixture::key(77, 0);
    let mut request = site.request(&pool);
    request.keys[3] = absent;
    let mut stream = pipeline.land(request).unwrap();
    let Next::End(end) = stream.next_layer(&compute) else { panic!("a layer came") };
    assert_eq!((end.usable_blocks, end.reason), (3, Some(EndReason::Store(Reason::NotHere(absent)))));
    drop(stream);
    // A link so slow that the ring is not free before the deadline.
    let slow = Emulated::new(Model { bytes_per_second: 100_000, ..Model::default() });
    let pool = Pool::new(&slow, COLUMNS[0]);
    let compute = slow.stream().unwrap();
    let now = site.store().clock().now();
    site.settle();
    let request = LandRequest { deadline: Some(now.plus(Duration::from_millis(150))), ..site.request(&pool) };
    let mut stream = site.pipeline(&slow).land(request).unwrap();
    let (came, end) = run(&mut stream, &pool, &slow, &compute);
    assert_eq!(end.reason, Some(EndReason::Deadline));
    assert!(came <= 2 && end.usable_layers == came, "the ring has two seats: {end:?}");
    drop((stream, compute));
    site.settle();
}

#[test]
fn whatever_the_device_does_bytes_are_right_or_there_is_an_error_and_all_comes_back() {
    let site = Site::new("faults");
    let layers = fixture::shape(PAGES, all_heads()).layers().len() as u64;
    let mut cases = vec![Faults { no_pin: true, ..Faults::default() }];
    for copy in 0..layers {
        cases.push(Faults { partial_copy: Some(copy), ..Faults::default() });
        cases.push(Faults { lost_at_copy: Some(copy), ..Faults::default() });
    }
    for faults in cases {
        let device = strict(faults.clone());
        {
            let pool = Pool::new(&device, COLUMNS[0]);
            let pipeline = site.pipeline(&device);
            let arena = Arena::new(1).unwrap();
            assert_eq!(arena.pin(pipeline.device()).is_err(), faults.no_pin);
            let compute = device.stream().unwrap();
            let mut stream = site.land(&pipeline, &pool).unwrap();
            let (_, end) = run(&mut stream, &pool, &device, &compute);
            let failed = faults.partial_copy.or(faults.lost_at_copy);
            assert_eq!(u64::from(end.usable_layers), failed.unwrap_or(layers), "{faults:?}: {end:?}");
            match (failed, end.reason) {
                (None, None) => {}
                (Some(_), Some(EndReason::Device(DeviceError::Partial { .. }))) => {
                    assert!(faults.partial_copy.is_some());
                }
                (Some(_), Some(EndReason::Device(DeviceError::Lost(_)))) => {
                    assert!(faults.lost_at_copy.is_some());
                }
                (_, other) => panic!("{faults:?}: {other:?}"),
            }
            for layer in 0..end.usable_layers {
                assert!(pool.is_there(&site, &device, layer), "{faults:?}: layer {layer}");
            }
        }
        site.settle();
        assert_eq!(device.in_use(), InUse::default(), "{faults:?}");
    }
}

/// Through a lander a device that fails is lost for all: what was usable is right, and every later landing says why.
#[test]
fn whatever_the_device_does_to_a_lander_bytes_are_right_or_there_is_an_error() {
    let site = Site::new("rings");
    for copy in 0..6 {
        let partial = Faults { partial_copy: Some(copy), ..Faults::default() };
        for faults in [partial, Faults { lost_at_copy: Some(copy), ..Faults::default() }] {
            let arena = Arena::new(1 << 20).unwrap();
            let device = strict(faults.clone());
            let pool = Pool::new(&device, COLUMNS[0]);
            let as_device: Arc<dyn Device> = Arc::new(device.clone());
            let lander = Lander::new(&as_device, 64 << 10).unwrap();
            let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
            let pipeline = Pipeline::new(store, as_device, arena, Curve::default()).with_lander(lander);
            let compute = device.stream().unwrap();
            let mut ends = Vec::new();
            for _ in 0..2 {
                match pipeline.land(site.request(&pool)) {
                    Ok(mut stream) => {
                        let (_, end) = run(&mut stream, &pool, &device, &compute);
                        for layer in 0..end.usable_layers {
                            assert!(pool.is_there(&site, &device, layer), "{faults:?}: layer {layer}");
                        }
                        ends.push(end.reason);
                    }
                    Err(LandError::Device(error)) => ends.push(Some(EndReason::Device(error))),
                    Err(other) => panic!("{faults:?}: {other:?}"),
                }
            }
            let failed = |end: &Option<EndReason>| matches!(end, Some(EndReason::Device(_)));
            // Of the numbers of slots, and of three layers of several segments, each copy is one of the first landing's.
            assert!(ends.iter().all(failed), "{faults:?}: {ends:?}");
        }
    }
}

#[test]
fn slots_that_the_engine_still_reads_are_written_behind_it_and_who_does_not_wait_is_seen() {
    let site = Site::new("after");
    for (waits, way) in [false, true].into_iter().flat_map(|waits| Site::WAYS.map(|way| (waits, way))) {
        let device = strict(Faults { stuck_copy: Some(0), ..Faults::default() });
        let pool = Pool::new(&device, COLUMNS[0]);
        let pipeline = way(&site, &device, &site.arena);
        let (engine, compute) = (device.stream().unwrap(), device.stream().unwrap());
        let _freed = Freed(&device);
        let done = read_by_the_engine(&pool, &device, &engine);
        let after = waits.then_some(done);
        site.settle();
        let mut stream = pipeline.land(LandRequest { after, ..site.request(&pool) }).unwrap();
        if waits {
            assert!(matches!(stream.next_layer(&compute), Next::Layer(layer) if layer.layer == 0));
            busy_link(&device);
            assert_eq!((device.hazards(), stream.landed()), (0, 0));
            device.unstick();
        }
        let end = loop {
            if let Next::End(end) = stream.next_layer(&compute) {
                break end;
            }
        };
        assert_eq!(end, LayerEnd { usable_layers: 3, usable_blocks: BLOCKS, reason: None });
        (0..3).for_each(|layer| assert!(pool.is_there(&site, &device, layer), "layer {layer}"));
        assert_eq!(device.hazards() == 0, waits);
    }
}

#[test]
fn what_cannot_begin_says_why_and_takes_nothing() {
    let site = Site::new("begin");
    let crooked = Emulated::new(Model { align: 16, ..Model::default() });
    let pool = Pool::new(&crooked, COLUMNS[0]);
    let compute = crooked.stream().unwrap();
    let mut stream = site.land(&site.pipeline(&crooked), &pool).unwrap();
    let (came, end) = run(&mut stream, &pool, &crooked, &compute);
    let misaligned = matches!(end.reason, Some(EndReason::Device(DeviceError::Misaligned { align: 16, .. })));
    assert!(came == 0 && misaligned, "{end:?}");
    drop(stream);
    let mute = strict(Faults { no_stream: true, ..Faults::default() });
    let pool = Pool::new(&mute, COLUMNS[0]);
    let refused = site.land(&site.pipeline(&mute), &pool).unwrap_err();
    assert!(matches!(refused, LandError::Device(DeviceError::Call { .. })));
    let device = strict(Faults::default());
    let pool = Pool::new(&device, COLUMNS[0]);
    let pipeline = site.pipeline(&device);
    site.settle();
    let held = (site.arena.take(1, 128 << 10).unwrap(), site.arena.take(1, 1).unwrap());
    let full = pipeline.land(site.request(&pool)).unwrap_err();
    assert_eq!((full.kind(), matches!(full, LandError::ArenaFull { free: 0, .. })), (Kind::Retry, true));
    drop(held);
    let tiny = Arena::new(1).unwrap();
    let store: Arc<dyn KvStore> = Arc::new(site.store().clone());
    let small = Pipeline::new(store, Arc::new(device.clone()), tiny.clone(), Curve::default());
    let refused = site.land(&small, &pool).unwrap_err();
    assert!(matches!(refused, LandError::ArenaTooSmall { total: 65_536, .. }), "{refused:?}");
    let keys = fixture::keys(9, 0..2);
    let few = pipeline.land(LandRequest { keys, ..site.request(&pool) }).unwrap_err();
    assert!(matches!(few, LandError::Request(_)));
    assert_eq!((site.arena.usage().used, tiny.usage().used), (0, 0));
}

#[test]
fn a_caller_that_leaves_early_gives_everything_back() {
    let site = Site::new("leave");
    let device = strict(Faults::default());
    for (takes, way) in (0..3).flat_map(|takes| Site::WAYS.map(|way| (takes, way))) {
        let pipeline = way(&site, &device, &site.arena);
        let pool = Pool::new(&device, COLUMNS[0]);
        let compute = device.stream().unwrap();
        let mut stream = site.land(&pipeline, &pool).unwrap();
        for _ in 0..takes {
            assert!(matches!(stream.next_layer(&compute), Next::Layer(_)));
        }
        stream.stop();
        drop(stream);
        assert!(drain(&device, &compute).is_ok());
    }
    site.settle();
    assert_eq!(device.in_use(), InUse::default());
}
