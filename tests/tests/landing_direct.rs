//! Layers that come straight from files into the memory of an emulated device: bytes, faults, the way round through the
//! arena, and what is left behind.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{DeleteRequest, KvStore, Target, Verify};
use kvarts_contract::blocking::block_on;
use kvarts_contract::class::Class;
use kvarts_contract::error::{Kind, Reason};
use kvarts_gpudirect::device::emulated::{Emulated, Faults, Model};
use kvarts_gpudirect::device::{Device, InUse, drain};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::pace::RealPace;
use kvarts_gpudirect::pipeline::{DirectUse, FAILURES_MAX, LandRequest, LayerEnd, Next, Pipeline};
use kvarts_gpudirect::{Destination, DeviceArena};
use kvarts_store::lend::LendRequest;
use kvarts_tests::fixture::{self, PAGES, all_heads};
use kvarts_tests::landed::{
    BLOCKS, COLUMNS, Freed, Pool, Site, busy_link, read_by_the_engine, run, strict, until,
};

/// A pipeline that reads files straight into a device, whose arena there has `bytes` bytes.
fn straight(site: &Site, device: &Emulated, bytes: u64) -> (Pipeline, DeviceArena) {
    let shared: Arc<dyn Device> = Arc::new(device.clone());
    let arena = DeviceArena::new(&shared, bytes).unwrap();
    (site.pipeline(device).with_files(site.store().clone(), arena.clone()), arena)
}

/// Room for two streams, each with two of the three layers with whole pages.
const RING: u64 = 256 << 10;

fn used(pipeline: &Pipeline) -> DirectUse {
    pipeline.direct_use().unwrap()
}

/// Lands the run in a new pool and looks at it; gives the end and how much of it came.
fn landed(site: &Site, pipeline: &Pipeline, device: &Emulated, verify: Verify) -> LayerEnd {
    let pool = Pool::new(device, COLUMNS[0]);
    let compute = device.stream().unwrap();
    site.settle();
    let mut stream = pipeline.land(LandRequest { verify, ..site.request(&pool) }).unwrap();
    let (came, end) = run(&mut stream, &pool, device, &compute);
    drain(device, &compute).unwrap();
    assert_eq!(end.usable_layers, came);
    assert_eq!(device.hazards(), 0);
    if verify == Verify::Always {
        (0..came).for_each(|layer| assert!(pool.is_there(site, device, layer), "layer {layer}"));
    }
    end
}

fn whole() -> LayerEnd {
    LayerEnd { usable_layers: 3, usable_blocks: BLOCKS, reason: None }
}

#[test]
fn every_layer_comes_straight_into_its_slots_and_nothing_is_left_behind() {
    let site = Site::new("straight");
    for column in COLUMNS {
        let device = strict(Faults::default());
        {
            let (pipeline, arena) = straight(&site, &device, RING);
            for round in 1..4 {
                let pool = Pool::new(&device, column);
                let compute = device.stream().unwrap();
                let mut stream = pipeline.land(site.request(&pool)).unwrap();
                let (came, end) = run(&mut stream, &pool, &device, &compute);
                let layers = pool.shape.layers().len() as u32;
                assert_eq!((came, &end.reason, end.usable_blocks), (layers, &None, BLOCKS), "{end:?}");
                drain(&device, &compute).unwrap();
                assert_eq!(device.hazards(), 0);
                (0..layers).for_each(|layer| assert!(pool.is_there(&site, &device, layer), "layer {layer}"));
                let used = used(&pipeline);
                assert_eq!((used.layers, used.staged), (u64::from(layers) * round, 0), "{used:?}");
                assert_eq!(used.bytes % 4096, 0);
                drop(stream);
                until("reads let go", || arena.usage().used == 0);
                assert_eq!(device.in_use().files, 1, "the arena, and no file");
            }
            assert_eq!(site.arena.usage().used_max, 0, "nothing came through the host");
        }
        assert_eq!(device.in_use(), InUse::default());
    }
}

#[test]
fn a_range_of_layers_comes_alone_and_a_contiguous_buffer_serves_as_well() {
    let site = Site::new("straight-range");
    let device = strict(Faults::default());
    let (pipeline, _arena) = straight(&site, &device, RING);
    let shape = Arc::new(fixture::shape(PAGES, all_heads()));
    let memory = device.allocate(shape.block_bytes() * u64::from(BLOCKS)).unwrap();
    let compute = device.stream().unwrap();
    let pool = Pool::new(&device, COLUMNS[0]);
    let into = Destination::contiguous(&shape, memory.clone(), BLOCKS).unwrap();
    let mut stream = pipeline.land(LandRequest { layers: Some(1..3), into, ..site.request(&pool) }).unwrap();
    for expected in 1..3 {
        assert!(matches!(stream.next_layer(&compute), Next::Layer(layer) if layer.layer == expected));
    }
    assert!(matches!(
        stream.next_layer(&compute),
        Next::End(LayerEnd { usable_layers: 2, reason: None, .. })
    ));
    let mut at = shape.layers()[0].bytes() * u64::from(BLOCKS);
    assert!(device.peek(&memory, 0, at).unwrap().iter().all(|&byte| byte == 0), "layer 0 was not asked for");
    for part in pool.parts(1).chain(pool.parts(2)) {
        for key in &site.keys {
            let chunk = &fixture::content(key, PAGES, all_heads(), 1, &shape)[part];
            assert_eq!(&device.peek(&memory, at, chunk.len() as u64).unwrap(), chunk, "part {part}");
            at += chunk.len() as u64;
        }
    }
    assert_eq!(used(&pipeline).layers, 2);
}

#[test]
fn what_a_read_garbles_or_fails_comes_through_the_arena_from_that_layer_on() {
    let site = Site::new("straight-faults");
    for number in 0..3 {
        for (failed_read, garbled_read) in [(Some(number), None), (None, Some(number))] {
            let device = strict(Faults { failed_read, garbled_read, ..Faults::default() });
            {
                let (pipeline, arena) = straight(&site, &device, RING);
                assert_eq!(landed(&site, &pipeline, &device, Verify::Always), whole());
                let found = used(&pipeline);
                assert!(found.layers < 3 && found.staged == 1 && !found.off, "{found:?}");
                let why = found.last_reason.unwrap();
                let said = if garbled_read.is_some() { "the digest of layer" } else { "set to fail reads" };
                assert!(why.contains(said), "{why}");
                // What is read for the next is not known to be bad.
                assert_eq!(landed(&site, &pipeline, &device, Verify::Always), whole());
                assert_eq!(used(&pipeline).layers, found.layers + 3);
                until("reads let go", || arena.usage().used == 0);
            }
            site.settle();
            assert_eq!(device.in_use(), InUse::default());
        }
    }
}

#[test]
fn what_is_damaged_on_the_disk_ends_the_stream_as_an_ordinary_read_does() {
    let site = Site::new("straight-damaged");
    let device = strict(Faults::default());
    let (pipeline, _arena) = straight(&site, &device, RING);
    // The first byte of block 4 in the last layer.
    let lent = block_on(site.store().lend(LendRequest {
        namespace: site.namespace,
        group: PAGES,
        coordinate: all_heads(),
        keys: site.keys.clone(),
        layers: None,
        class: Class::Foreground,
        deadline: None,
    }));
    let lent = lent.unwrap();
    let layer = &lent.layers()[2];
    let chunk = layer.chunks.iter().find(|chunk| chunk.ordinal == 4).unwrap();
    let range = &layer.ranges[chunk.range as usize];
    let path = std::fs::read_link(format!("/proc/self/fd/{}", {
        use std::os::fd::{AsFd, AsRawFd};
        lent.files()[range.file as usize].as_fd().as_raw_fd()
    }));
    let file = std::fs::File::options().read(true).write(true).open(path.unwrap()).unwrap();
    let (at, mut byte) = (range.offset + chunk.at, [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    drop(lent);
    let end = landed(&site, &pipeline, &device, Verify::Always);
    assert_eq!((end.usable_layers, end.usable_blocks), (2, 4), "{end:?}");
    assert!(matches!(&end.reason, Some(EndReason::Store(Reason::Digest { .. }))), "{end:?}");
    assert_eq!(end.reason.unwrap().kind(), Kind::Corrupt);
    let found = used(&pipeline);
    assert_eq!((found.layers, found.staged), (2, 1));
    // The block is out of service now, so nothing is lent.
    let end = landed(&site, &pipeline, &device, Verify::Always);
    assert_eq!(end.usable_blocks, 4);
    assert!(matches!(end.reason, Some(EndReason::Store(_))), "{end:?}");
    assert_eq!((used(&pipeline).layers, used(&pipeline).off), (2, false));
    // What the ordinary read found as well is not counted against straight reads.
    device.fail_reads(true);
    for _ in 1..FAILURES_MAX {
        let pool = Pool::new(&device, COLUMNS[1]);
        let compute = device.stream().unwrap();
        let mut stream = site.land(&pipeline, &pool).unwrap();
        assert_eq!(run(&mut stream, &pool, &device, &compute).1.reason, None);
    }
    assert!(!used(&pipeline).off);
}

#[test]
fn after_failures_in_a_row_nothing_is_tried_any_more_and_a_success_between_them_counts() {
    let site = Site::new("straight-off");
    let device = strict(Faults::default());
    let (pipeline, _arena) = straight(&site, &device, RING);
    let land = |fail: bool| {
        device.fail_reads(fail);
        assert_eq!(landed(&site, &pipeline, &device, Verify::Always), whole());
        used(&pipeline)
    };
    for _ in 0..2 {
        assert!((1..FAILURES_MAX).all(|_| !land(true).off));
        assert!(!land(false).off);
    }
    let before = used(&pipeline);
    assert_eq!((before.layers, before.staged), (6, u64::from(FAILURES_MAX - 1) * 2));
    assert!((1..FAILURES_MAX).all(|_| !land(true).off));
    assert!(land(true).off);
    let reads = device.reads();
    assert_eq!(land(false).layers, before.layers);
    assert_eq!(device.reads(), reads, "none is tried");
}

#[test]
fn a_device_that_cannot_digest_verifies_through_the_arena_and_samples_what_it_copies_back() {
    let site = Site::new("straight-judge");
    let mute = |garbled_read| strict(Faults { no_digests: true, garbled_read, ..Faults::default() });
    let device = mute(None);
    let (pipeline, arena) = straight(&site, &device, RING);
    assert_eq!(landed(&site, &pipeline, &device, Verify::Always), whole());
    assert_eq!((device.reads(), used(&pipeline).staged), (0, 1));
    assert_eq!(landed(&site, &pipeline, &device, Verify::Sample(1000)), whole());
    assert_eq!((used(&pipeline).layers, used(&pipeline).staged), (3, 1));
    until("reads let go", || arena.usage().used == 0);
    // Sampling everything finds what a read garbles; sampling nothing, and asking for nothing, does not.
    for (verify, layers) in [(Verify::Sample(1000), 0), (Verify::Sample(0), 3), (Verify::Never, 3)] {
        let device = mute(Some(0));
        let (pipeline, _arena) = straight(&site, &device, RING);
        assert_eq!(landed(&site, &pipeline, &device, verify), whole(), "{verify:?}");
        assert_eq!(used(&pipeline).layers, layers, "{verify:?}");
    }
    // A device that can is asked for samples itself.
    let device = strict(Faults { garbled_read: Some(0), ..Faults::default() });
    let (pipeline, _arena) = straight(&site, &device, RING);
    assert_eq!(landed(&site, &pipeline, &device, Verify::Sample(1000)), whole());
    assert_eq!(used(&pipeline).staged, 1);
}

#[test]
fn where_the_device_has_no_room_or_a_block_is_missing_the_arena_serves() {
    let site = Site::new("straight-room");
    let device = strict(Faults::default());
    let (pipeline, arena) = straight(&site, &device, 64 << 10);
    assert_eq!(landed(&site, &pipeline, &device, Verify::Always), whole());
    assert_eq!((device.reads(), used(&pipeline).staged, arena.usage().used), (0, 1, 0));
    let (pipeline, _arena) = straight(&site, &device, RING);
    let pool = Pool::new(&device, COLUMNS[0]);
    let compute = device.stream().unwrap();
    let mut request = site.request(&pool);
    request.keys[3] = fixture::key(77, 0);
    site.settle();
    let mut stream = pipeline.land(request).unwrap();
    let Next::End(end) = stream.next_layer(&compute) else { panic!("a layer came") };
    assert_eq!(end.usable_blocks, 3);
    assert!(matches!(end.reason, Some(EndReason::Store(Reason::NotHere(_)))), "{end:?}");
    assert!(!used(&pipeline).off);
}

#[test]
fn a_read_that_stands_still_holds_up_nobody_who_leaves_and_a_deadline_ends_the_wait() {
    let site = Site::new("straight-stuck");
    let device = strict(Faults { stuck_read: Some(0), ..Faults::default() });
    {
        let (pipeline, arena) = straight(&site, &device, RING);
        let pool = Pool::new(&device, COLUMNS[0]);
        let compute = device.stream().unwrap();
        let now = site.store().clock().now();
        let deadline = Some(now.plus(Duration::from_millis(100)));
        let mut stream = pipeline.land(LandRequest { deadline, ..site.request(&pool) }).unwrap();
        let (came, end) = run(&mut stream, &pool, &device, &compute);
        assert_eq!((came, end.reason), (0, Some(EndReason::Deadline)));
        drop(stream);
        assert!(arena.usage().used > 0, "the read may still write");
        device.unstick();
        until("the read lets go", || arena.usage().used == 0);
        let device = strict(Faults { stuck_read: Some(0), ..Faults::default() });
        let (pipeline, arena) = straight(&site, &device, RING);
        let stream = pipeline.land(site.request(&pool)).unwrap();
        until("it reads", || device.reads() > 0);
        stream.stop();
        drop(stream);
        device.declare_lost("it does not answer");
        until("the read lets go", || arena.usage().used == 0);
    }
    until("all is given back", || device.in_use() == InUse::default());
}

#[test]
fn a_lost_device_ends_the_stream_and_a_copy_that_fails_is_told_as_such() {
    let site = Site::new("straight-lost");
    for copy in 0..3 {
        let model = Model { strict: true, ..Model::default() };
        let faults = Faults { lost_at_copy: Some(copy), ..Faults::default() };
        let device = Emulated::with(model, faults, RealPace::new());
        {
            let (pipeline, arena) = straight(&site, &device, RING);
            let pool = Pool::new(&device, COLUMNS[0]);
            let compute = device.stream().unwrap();
            let mut stream = pipeline.land(site.request(&pool)).unwrap();
            let (_, end) = run(&mut stream, &pool, &device, &compute);
            assert!(matches!(end.reason, Some(EndReason::Device(_))), "{end:?}");
            assert!(u64::from(end.usable_layers) <= copy);
            for layer in 0..end.usable_layers {
                assert!(pool.is_there(&site, &device, layer), "layer {layer}");
            }
            drop(stream);
            until("reads let go", || arena.usage().used == 0);
        }
        site.settle();
        assert_eq!(device.in_use(), InUse::default());
    }
}

#[test]
fn a_destination_for_blocks_of_another_shape_is_refused_as_an_ordinary_read_refuses_it() {
    let site = Site::new("straight-shape");
    let device = strict(Faults::default());
    let (pipeline, arena) = straight(&site, &device, RING);
    let pool = Pool::new(&device, COLUMNS[0]);
    let other = Pool::new(&device, COLUMNS[1]);
    let request = LandRequest { into: other.into.clone(), ..site.request(&pool) };
    let refused = pipeline.land(request).unwrap_err();
    assert!(matches!(refused, LandError::Store(Reason::Shape(_))), "{refused:?}");
    assert_eq!((device.reads(), arena.usage().used), (0, 0));
}

#[test]
fn a_copy_back_that_never_ends_ends_the_stream_and_keeps_its_memory_until_it_is_done() {
    let site = Site::new("straight-stuck-sample");
    let faults = Faults { no_digests: true, stuck_copy: Some(0), ..Faults::default() };
    let device = strict(faults);
    {
        let (pipeline, arena) = straight(&site, &device, RING);
        let pipeline = pipeline.with_copy_timeout(Duration::from_millis(20));
        let pool = Pool::new(&device, COLUMNS[0]);
        let compute = device.stream().unwrap();
        let request = LandRequest { verify: Verify::Sample(1000), ..site.request(&pool) };
        let mut stream = pipeline.land(request).unwrap();
        let (came, end) = run(&mut stream, &pool, &device, &compute);
        assert_eq!(came, 0);
        assert!(matches!(end.reason, Some(EndReason::Device(DeviceError::Stuck { .. }))), "{end:?}");
        drop(stream);
        assert!(arena.usage().used > 0 && site.arena.usage().used > 0, "the copy may still read and write");
        device.unstick();
        until("what is stuck lets go", || arena.usage().used == 0 && site.arena.usage().used == 0);
    }
    until("all is given back", || device.in_use() == InUse::default());
}

#[test]
fn nothing_is_given_out_behind_a_copy_that_failed_and_a_stop_ends_what_was_read_ahead() {
    let site = Site::new("straight-ahead");
    for stuck in [false, true] {
        let at = Some(0);
        let faults = match stuck {
            false => Faults { partial_copy: at, ..Faults::default() },
            true => Faults { stuck_copy: at, ..Faults::default() },
        };
        let device = strict(faults);
        {
            // Room for every layer: all of them are read before the first copy ends.
            let (pipeline, arena) = straight(&site, &device, 1 << 20);
            let pipeline = pipeline.with_copy_timeout(Duration::from_millis(20));
            let pool = Pool::new(&device, COLUMNS[0]);
            let compute = device.stream().unwrap();
            let request = LandRequest { depth_bytes: 1 << 20, ..site.request(&pool) };
            let mut stream = pipeline.land(request).unwrap();
            // A layer is given out when its copies are enqueued: they may fail afterwards.
            while matches!(stream.next_layer(&compute), Next::Layer(_)) {}
            let Next::End(end) = stream.next_layer(&compute) else { panic!("a layer behind a hole") };
            assert!(end.usable_layers == 0 && matches!(end.reason, Some(EndReason::Device(_))), "{end:?}");
            device.unstick();
            drop(stream);
            until("reads let go", || arena.usage().used == 0);
        }
        until("all is given back", || device.in_use() == InUse::default());
    }
}

#[test]
fn streams_share_the_devices_memory_and_who_finds_none_comes_through_the_arena() {
    let site = Site::new("straight-many");
    let device = strict(Faults { stuck_read: Some(0), ..Faults::default() });
    let (pipeline, arena) = straight(&site, &device, RING / 2);
    let pools = [Pool::new(&device, COLUMNS[0]), Pool::new(&device, COLUMNS[0])];
    let compute = device.stream().unwrap();
    let mut streams: Vec<_> = pools.iter().map(|pool| pipeline.land(site.request(pool)).unwrap()).collect();
    device.unstick();
    for (stream, pool) in streams.iter_mut().zip(&pools) {
        let (_, end) = run(stream, pool, &device, &compute);
        assert_eq!(end, whole());
    }
    drop(streams);
    drain(&device, &compute).unwrap();
    for pool in &pools {
        (0..3).for_each(|layer| assert!(pool.is_there(&site, &device, layer), "layer {layer}"));
    }
    let used = used(&pipeline);
    assert_eq!((used.layers, used.staged, used.off), (3, 1, false), "{used:?}");
    until("reads let go", || arena.usage().used == 0);
}

#[test]
fn with_the_arena_full_a_detour_ends_the_stream_and_says_so() {
    let site = Site::new("straight-full");
    let device = strict(Faults { garbled_read: Some(0), ..Faults::default() });
    let (pipeline, _arena) = straight(&site, &device, RING);
    let pool = Pool::new(&device, COLUMNS[0]);
    let compute = device.stream().unwrap();
    let held = (site.arena.take(1, 128 << 10).unwrap(), site.arena.take(1, 1).unwrap());
    let mut stream = pipeline.land(site.request(&pool)).unwrap();
    let (came, end) = run(&mut stream, &pool, &device, &compute);
    assert_eq!((came, end.reason), (0, Some(EndReason::Store(Reason::Busy("the arena is full")))));
    drop(held);
}

#[test]
fn slots_that_the_engine_still_reads_are_written_behind_it_and_who_does_not_wait_is_seen() {
    let site = Site::new("straight-after");
    for waits in [false, true] {
        let device = strict(Faults { stuck_copy: Some(0), ..Faults::default() });
        let pool = Pool::new(&device, COLUMNS[0]);
        let (pipeline, _arena) = straight(&site, &device, RING);
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
fn a_read_that_stands_still_sends_its_layers_through_the_arena_and_counts_as_a_failure() {
    let site = Site::new("straight-timeout");
    let device = strict(Faults { stuck_read: Some(0), ..Faults::default() });
    {
        let _freed = Freed(&device);
        let (pipeline, arena) = straight(&site, &device, RING);
        let hasty = pipeline.clone().with_read_timeout(Duration::from_millis(30));
        assert_eq!(landed(&site, &hasty, &device, Verify::Always), whole());
        let found = used(&pipeline);
        assert_eq!((found.layers, found.staged, found.off), (0, 1, false));
        assert!(
            found.last_reason.as_ref().is_some_and(|why| why.contains("did not end within")),
            "{found:?}"
        );
        assert!(arena.usage().used > 0, "the read may still write");
        device.fail_reads(true);
        for left in (1..FAILURES_MAX).rev() {
            assert_eq!(landed(&site, &pipeline, &device, Verify::Always), whole());
            assert_eq!(used(&pipeline).off, left == 1);
        }
        device.unstick();
        until("the read lets go", || arena.usage().used == 0);
    }
    until("all is given back", || device.in_use() == InUse::default());
}

#[test]
fn a_stream_that_is_left_while_a_read_stands_still_counts_once_that_is_late() {
    let site = Site::new("straight-left");
    let device = strict(Faults { stuck_read: Some(0), ..Faults::default() });
    {
        let _freed = Freed(&device);
        let (pipeline, arena) = straight(&site, &device, RING);
        let pool = Pool::new(&device, COLUMNS[0]);
        let compute = device.stream().unwrap();
        let deadline = Some(site.store().clock().now().plus(Duration::from_millis(200)));
        let mut stream = pipeline.land(LandRequest { deadline, ..site.request(&pool) }).unwrap();
        assert_eq!(run(&mut stream, &pool, &device, &compute).1.reason, Some(EndReason::Deadline));
        drop(stream);
        // What it read into stands still for longer than a shorter timeout by now.
        let hasty = pipeline.with_read_timeout(Duration::from_millis(1));
        device.fail_reads(true);
        for left in (1..FAILURES_MAX).rev() {
            assert_eq!(landed(&site, &hasty, &device, Verify::Always), whole());
            assert_eq!(used(&hasty).off, left == 1);
        }
        device.unstick();
        until("the read lets go", || arena.usage().used == 0);
    }
    until("all is given back", || device.in_use() == InUse::default());
}

#[test]
fn a_copy_back_that_is_cut_short_sends_its_layer_through_the_arena_and_ends_nothing() {
    let site = Site::new("straight-cut-sample");
    let device = strict(Faults { no_digests: true, partial_copy: Some(0), ..Faults::default() });
    {
        let (pipeline, arena) = straight(&site, &device, RING);
        assert_eq!(landed(&site, &pipeline, &device, Verify::Sample(1000)), whole());
        let found = used(&pipeline);
        assert_eq!((found.layers, found.staged), (0, 1), "{found:?}");
        until("reads let go", || arena.usage().used == 0);
    }
    site.settle();
    until("all is given back", || device.in_use() == InUse::default());
}

/// Layers of a block that was put again by another producer since it was lent would be a mix with those that came straight.
#[test]
fn what_comes_through_the_arena_is_the_production_that_was_lent_or_nothing() {
    let site = Site::new("straight-origins");
    let device = strict(Faults::default());
    assert_eq!(landed(&site, &straight(&site, &device, RING).0, &device, Verify::Always), whole());
    let last = device.reads() - 1;
    let device = strict(Faults { stuck_read: Some(0), failed_read: Some(last), ..Faults::default() });
    {
        let _freed = Freed(&device);
        let (pipeline, arena) = straight(&site, &device, RING);
        let pool = Pool::new(&device, COLUMNS[0]);
        let compute = device.stream().unwrap();
        let mut stream = pipeline.land(site.request(&pool)).unwrap();
        until("it reads", || device.reads() > 0);
        let (column, keys) = (Some(COLUMNS[0]), site.request(&pool).keys);
        let target = Target::Keys { column, keys };
        let namespace = site.request(&pool).namespace;
        let mut deleted = site.store().delete(DeleteRequest { namespace, target, deadline: None });
        deleted.wait(&**site.store().clock(), None).unwrap().unwrap().unwrap();
        let mut put = site.store().put(site.put(COLUMNS[0]));
        put.wait(&**site.store().clock(), None).unwrap().unwrap().unwrap();
        device.unstick();
        let (_, end) = run(&mut stream, &pool, &device, &compute);
        assert_eq!((end.usable_blocks, used(&pipeline).staged), (0, 1), "{end:?}");
        drain(&device, &compute).unwrap();
        drop(stream);
        until("reads let go", || arena.usage().used == 0);
    }
    until("all is given back", || device.in_use() == InUse::default());
}
