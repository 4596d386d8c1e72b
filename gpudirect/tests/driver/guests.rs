//! Our calls as guests of an engine's process: its threads keep their contexts, its graphs are captured, and a driver that
//! does not say whether a copy is done is not taken at its word.

use std::os::fd::AsFd;
use std::time::Duration;

use kvarts_contract::blocking::block_on;
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Batch, Device, Direction, Method, Piece, Route, drain};
use kvarts_gpudirect::error::{DeviceError, EndReason, LandError};
use kvarts_gpudirect::pipeline::Next;

use crate::copies::{host, pattern, there_and_back};
use crate::files::file;
use crate::pipeline::{LAYERS, Pool, Site, take_all};
use crate::standin::{Files, Kit, Standin, here, inside, until};
use crate::way::is_real;

/// cuFile's driver stays open as long as the process, where anything was read by it.
fn close() {
    if !is_real() {
        assert_eq!(Files::load().driver("cuFileDriverClose_v2"), 0);
    }
}

/// Everything that a device does, with its things dropped here too.
fn everything(standin: &Standin, device: &Cuda) {
    let look = standin.thread();
    let same = |what: &str| assert_eq!(standin.thread(), look, "{what}");
    let memory = device.allocate(4096).unwrap();
    same("allocate");
    drop(device.adopt(memory.base(), 10).unwrap());
    same("adopt");
    let (region, _) = host(4096);
    device.pin(&region).unwrap();
    same("pin");
    device.unpin(&region);
    same("unpin");
    let stream = device.stream().unwrap();
    same("stream");
    drop(device.adopt_stream(0).unwrap());
    let event = device.record(&stream).unwrap();
    device.wait(&stream, &event).unwrap();
    device.synchronize(&event).unwrap();
    same("events");
    for method in Method::ALL {
        there_and_back(standin, device, method, true);
    }
    same("copies");
    standin.poke(memory.base(), &pattern(4096, 5));
    assert_eq!(device.digests(&memory, &[(0, 4096)]), Ok(vec![crc32fast::hash(&pattern(4096, 5))]));
    device.export(&memory).unwrap();
    same("digests");
    if !is_real() {
        let files = device.files(Route::Strict).unwrap();
        let source = file(&pattern(4096, 6));
        let (into, open) = (files.register(&memory).unwrap(), files.open(source.as_fd()).unwrap());
        files.read(&open, 0, &into, 0, 4096).unwrap();
        drop((open, into, files));
        same("files");
    }
    // Calls that fail leave it as it was, too.
    standin.fail("cuStreamCreate", 1, 1);
    assert!(device.stream().is_err());
    standin.fail("cuEventRecord", 1, 1);
    assert!(device.record(&stream).is_err());
    same("failures");
    drop(event);
    drop(stream);
    drop(memory);
    same("drops");
}

#[test]
fn a_thread_finds_its_own_context_as_it_was_whatever_is_called_on_it() {
    inside(Kit::Whole, here!(), |standin| {
        standin.needs_devices(2);
        let (device, other) = (Cuda::open(0).unwrap(), Cuda::open(1).unwrap());
        assert_eq!(standin.thread(), (0, 0), "opening a device leaves nothing current");
        everything(standin, &device);
        standin.enter(1);
        let theirs = standin.thread();
        assert_ne!(theirs.0, 0);
        everything(standin, &device);
        drop(Cuda::open(0).unwrap());
        drop(device);
        assert_eq!(standin.thread(), theirs);
        drop(other);
        close();
    });
}

#[test]
fn an_engine_captures_its_graph_while_layers_land_and_leave() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        standin.capture(true);
        {
            let (pipeline, pool) = (site.pipeline(Method::Kernel), Pool::new(&site));
            let compute = site.device.stream().unwrap();
            let mut landing = site.land(&pipeline, 1, &pool).unwrap();
            take_all(&mut landing, &compute);
            drop(landing);
            assert!(pool.holds(standin, &pool.expected(&site)));
            until("the arena is free", || site.arena.usage().used == 0);
            let mut sink = pipeline.store_layers(site.leave(2, &pool)).unwrap();
            (0..LAYERS as u32).for_each(|layer| drop(sink.store_layer(layer, &compute).unwrap()));
            block_on(sink.seal().unwrap()).unwrap().unwrap();
            everything(standin, &site.device);
        }
        assert_eq!(standin.misuse(), Vec::<String>::new());
        standin.capture(false);
        close();
    });
}

/// The engine captures on the very stream that it gives to us: nothing of ours may come into its graph.
#[test]
fn a_stream_that_is_captured_is_refused_before_anything_is_enqueued() {
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let (_engine, number) = (device.stream().unwrap(), standin.latest());
        let adopted = device.adopt_stream(standin.handle(number)).unwrap();
        let (own, other) = (device.stream().unwrap(), device.allocate(64).unwrap());
        let event = device.record(&own).unwrap();
        let (region, buf) = host(64);
        device.pin(&region).unwrap();
        assert!(standin.capture_of(number, true));
        assert!(matches!(device.record(&adopted), Err(DeviceError::Captured)));
        assert_eq!(device.wait(&adopted, &event), Err(DeviceError::Captured));
        let pieces =
            [Piece { memory: 0, at: 0, host: 0, len: 64 }, Piece { memory: 0, at: 0, host: 0, len: 8 }];
        let memories = [device.allocate(64).unwrap()];
        for (method, direction) in Method::ALL.map(|method| (method, Direction::ToDevice)) {
            let batch = Batch { direction, method, host: &buf, memories: &memories, pieces: &pieces };
            assert_eq!(device.copy(&adopted, &batch), Err(DeviceError::Captured), "{method:?}");
        }
        for count in [1, 2] {
            let spread = device.spread(&adopted, &other, &memories, &pieces[..count]);
            assert_eq!(spread, Err(DeviceError::Captured));
        }
        // Taking it, and what is done elsewhere, breaks nothing.
        drop(device.adopt_stream(standin.handle(number)).unwrap());
        drain(&device, &own).unwrap();
        assert!(standin.capture_of(number, false), "the engine has its graph");
        device.wait(&adopted, &event).unwrap();
        drain(&device, &adopted).unwrap();
        // The default stream, while another that waits for it is captured.
        standin.refuse_call("cuStreamIsCapturing", 906);
        let usual = device.adopt_stream(0).unwrap();
        assert!(matches!(device.record(&usual), Err(DeviceError::Captured)));
        standin.refuse_call("cuStreamIsCapturing", 0);
        device.unpin(&region);
    });
}

#[test]
fn layers_are_refused_on_a_stream_that_is_captured_and_come_and_go_when_it_is_not() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Kernel), Pool::new(&site));
        let (_engine, number) = (site.device.stream().unwrap(), standin.latest());
        let compute = site.device.adopt_stream(standin.handle(number)).unwrap();
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        assert!(standin.capture_of(number, true));
        for _ in 0..2 {
            assert_eq!(landing.next_layer(&compute), Next::Refused(DeviceError::Captured));
        }
        assert!(standin.capture_of(number, false), "the engine has its graph");
        take_all(&mut landing, &compute);
        drop(landing);
        assert!(pool.holds(standin, &pool.expected(&site)));
        until("the arena is free", || site.arena.usage().used == 0);
        let mut sink = pipeline.store_layers(site.leave(2, &pool)).unwrap();
        drop(sink.store_layer(0, &compute).unwrap());
        let copies = standin.calls("cuLaunchKernel");
        assert!(standin.capture_of(number, true));
        let refused = sink.store_layer(1, &compute).unwrap_err();
        assert_eq!(refused, LandError::Device(DeviceError::Captured));
        assert_eq!(standin.calls("cuLaunchKernel"), copies, "nothing was enqueued");
        assert!(standin.capture_of(number, false), "the engine has its graph");
        (1..LAYERS as u32).for_each(|layer| drop(sink.store_layer(layer, &compute).unwrap()));
        block_on(sink.seal().unwrap()).unwrap().unwrap();
    });
}

/// Errors that every call answers with from then on, and that no list has: what the device was given has ended with them.
#[test]
fn an_error_that_every_call_answers_with_is_the_devices_end_once_the_timeout_is_over() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("a device that breaks");
        for code in [220, 226, 806, 810, 911, 917, 999] {
            let site = Site::new();
            let (pipeline, pool) = (site.pipeline(Method::Each), Pool::new(&site));
            let pipeline = pipeline.with_copy_timeout(Duration::from_secs(1));
            let compute = site.device.stream().unwrap();
            let copies = standin.latest() + 1;
            standin.stand(copies);
            let mut landing = site.land(&pipeline, 1, &pool).unwrap();
            // What fits is enqueued, with events behind it, before the device breaks: what it takes afterwards has no event,
            // and is kept for good.
            let recorded = || standin.calls("cuEventRecord");
            until("nothing more is enqueued", || {
                let (before, asked) = (recorded(), standin.calls("cuEventQuery"));
                until("its end is asked for", || standin.calls("cuEventQuery") > asked + 30);
                recorded() == before
            });
            standin.break_work(1, code);
            standin.go(copies);
            let end = loop {
                if let Next::End(end) = landing.next_layer(&compute) {
                    break end;
                }
            };
            assert!(matches!(end.reason, Some(EndReason::Device(_))), "{code}: {end:?}");
            drop(landing);
            let arena = site.arena.clone();
            // The memory comes back although no caller declares the device lost.
            until("the memory comes back", || arena.usage().used == 0);
            assert!(matches!(site.device.record(&compute), Err(DeviceError::Lost(_))), "{code}");
            drop((arena, pipeline, pool, compute, site));
            until("everything came back", || standin.live().is_empty());
        }
        assert_eq!(standin.misuse(), Vec::<String>::new());
    });
}

/// A driver without modes of captures for each thread refuses every question while one lasts. The copy goes on.
#[test]
fn a_copy_that_a_driver_does_not_speak_of_is_not_done() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Each), Pool::new(&site));
        let compute = site.device.stream().unwrap();
        let copies = standin.latest() + 1;
        standin.stand(copies);
        standin.refuse_call("cuEventQuery", 900);
        let asked = standin.calls("cuEventQuery");
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        until("it was asked, and again", || standin.calls("cuEventQuery") > asked + 3);
        assert!(matches!(landing.next_layer(&compute), Next::Layer(layer) if layer.layer == 0));
        assert!(site.arena.usage().used > 0 && landing.landed() == 0);
        standin.refuse_call("cuEventQuery", 0);
        standin.go(copies);
        for _ in 1..LAYERS {
            assert!(matches!(landing.next_layer(&compute), Next::Layer(_)));
        }
        assert!(matches!(landing.next_layer(&compute), Next::End(end) if end.reason.is_none()));
        drain(&site.device, &compute).unwrap();
        assert!(pool.holds(standin, &pool.expected(&site)));
    });
}

/// Whatever else a driver says instead of an answer is told once the timeout is over. What the copy uses is kept until it
/// is known to be done.
#[test]
fn what_a_copy_uses_is_kept_when_asking_for_its_end_fails() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Each), Pool::new(&site));
        let pipeline = pipeline.with_copy_timeout(Duration::from_millis(20));
        let compute = site.device.stream().unwrap();
        let copies = standin.latest() + 1;
        standin.stand(copies);
        standin.refuse_call("cuEventQuery", 999);
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        let end = loop {
            if let Next::End(end) = landing.next_layer(&compute) {
                break end;
            }
        };
        let why = "CUDA_ERROR_UNKNOWN".to_owned();
        let failed = DeviceError::Call { call: "cuEventQuery", why };
        assert_eq!((end.usable_layers, end.reason), (0, Some(EndReason::Device(failed))));
        drop(landing);
        let arena = site.arena.clone();
        drop((pipeline, pool, compute, site));
        assert!(arena.usage().used > 0, "the copies still have it");
        drop(arena);
        assert_eq!(standin.misuse(), Vec::<String>::new());
        standin.go(copies);
        standin.refuse_call("cuEventQuery", 0);
        until("everything came back", || standin.live().is_empty());
    });
}
