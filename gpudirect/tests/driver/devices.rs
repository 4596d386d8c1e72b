//! The kinds of failure of the campaign's row R25, over the driver: what of them a program can bring about on a device in hand,
//! on the way there and on the way back, by each way of moving pieces. A round of each kind runs with the tests; `KVARTS_SOAK_S`
//! says for how many seconds they go on. Whatever fails, the bytes are right or there is a reason, and nothing is left.

use std::time::{Duration, Instant};

use kvarts_contract::api::BlockOutcome;
use kvarts_contract::blocking::block_on;
use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Device, Method};
use kvarts_gpudirect::error::EndReason;
use kvarts_gpudirect::pipeline::Next;

use crate::pipeline::{LAYERS, Pool, Site, take_all};
use crate::standin::{Kit, Standin, here, inside, until};

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Host memory cannot be pinned: it works, only slower.
    Registration,
    /// A call that copies fails.
    Refused,
    /// The device is declared lost in the middle.
    Lost,
    /// Copies that do not end within the timeout.
    Stuck,
    /// The caller lets go in the middle.
    Left,
}

const KINDS: [Kind; 5] = [Kind::Registration, Kind::Refused, Kind::Lost, Kind::Stuck, Kind::Left];

/// A number below a bound, different for each round.
fn draw(round: u64, below: u64) -> u64 {
    (round.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % below
}

/// The next calls that copy to the device, or from it.
fn refuse(standin: &Standin, method: Method, to_device: bool, nth: u64) {
    let call = match (method, to_device) {
        (Method::Each, true) => "cuMemcpyHtoDAsync_v2",
        (Method::Each, false) => "cuMemcpyDtoHAsync_v2",
        (Method::Batch, _) => "cuMemcpyBatchAsync",
        (Method::Kernel, _) => "cuLaunchKernel",
    };
    standin.fail(call, nth, 1);
}

fn there(standin: &Standin, kind: Kind, method: Method, round: u64) {
    let site = Site::with(kind != Kind::Registration);
    let timeout = Duration::from_millis(if kind == Kind::Stuck { 5 } else { 10_000 });
    let pipeline = site.pipeline(method).with_copy_timeout(timeout);
    let (pool, compute) = (Pool::new(&site), site.device.stream().unwrap());
    let copies = standin.latest() + 1;
    let until_layer = draw(round, LAYERS as u64) as u32;
    match kind {
        Kind::Refused => refuse(standin, method, true, 1 + u64::from(until_layer)),
        Kind::Stuck => standin.stand(copies),
        _ => {}
    }
    let mut landing = site.land(&pipeline, 1, &pool).unwrap();
    let mut came = 0;
    let end = loop {
        if came == until_layer && kind == Kind::Lost {
            site.device.declare_lost("it was pulled out");
        }
        if came == until_layer && kind == Kind::Left {
            break None;
        }
        match landing.next_layer(&compute) {
            Next::Layer(_) => came += 1,
            Next::Refused(error) => panic!("{kind:?}: {error}"),
            Next::End(end) => break Some(end),
        }
    };
    standin.go(copies);
    if let Some(end) = &end {
        let told = matches!(end.reason, Some(EndReason::Device(_)));
        let expected = match kind {
            Kind::Registration => end.reason.is_none() && end.usable_layers == LAYERS as u32,
            Kind::Refused | Kind::Stuck => told && end.usable_layers < LAYERS as u32,
            // It may have landed before; but nothing is given out any more.
            _ => came == until_layer && (told || end.reason.is_none()),
        };
        assert!(expected, "{kind:?}, {method:?}, round {round}: {end:?}");
        until("all copies are done", || standin.pending() == 0);
        let layers = 0..end.usable_layers as usize;
        let wrong: Vec<usize> = layers.filter(|layer| !pool.has_layer(standin, &site, *layer)).collect();
        assert!(wrong.is_empty(), "{kind:?}, {method:?}, round {round}: other bytes in {wrong:?}");
    }
    drop(landing);
    until("the arena is free", || site.arena.usage().used == 0);
}

fn back(standin: &Standin, kind: Kind, method: Method, round: u64) {
    let site = Site::with(kind != Kind::Registration);
    let timeout = Duration::from_millis(if kind == Kind::Stuck { 5 } else { 10_000 });
    let (pipeline, healthy) = (site.pipeline(method).with_copy_timeout(timeout), site.pipeline(method));
    let (pool, compute) = (Pool::new(&site), site.device.stream().unwrap());
    take_all(&mut site.land(&healthy, 1, &pool).unwrap(), &compute);
    until("it has landed", || standin.pending() == 0);
    until("the arena is free", || site.arena.usage().used == 0);
    let copies = standin.latest() + 1;
    let until_layer = draw(round, LAYERS as u64) as u32;
    match kind {
        Kind::Refused => refuse(standin, method, false, 1 + u64::from(until_layer)),
        Kind::Stuck => standin.stand(copies),
        _ => {}
    }
    let mut sink = pipeline.store_layers(site.leave(2, &pool)).unwrap();
    let mut taken = Ok(());
    for layer in 0..LAYERS as u32 {
        if layer == until_layer && kind == Kind::Lost {
            site.device.declare_lost("it was pulled out");
        }
        if layer == until_layer && kind == Kind::Left {
            break;
        }
        taken = taken.and_then(|()| sink.store_layer(layer, &compute).map(drop));
    }
    let stored = match kind {
        Kind::Left => {
            drop(sink);
            false
        }
        _ => match taken.and_then(|()| sink.seal()) {
            Ok(ticket) => {
                let reply = block_on(ticket).unwrap().unwrap();
                reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored)
            }
            Err(_) => false,
        },
    };
    standin.go(copies);
    assert_eq!(stored, kind == Kind::Registration, "{kind:?}, {method:?}, round {round}");
    until("all copies are done", || standin.pending() == 0);
    if stored {
        let again = Pool::new(&site);
        take_all(&mut site.land(&healthy, 2, &again).unwrap(), &compute);
        until("it has landed again", || standin.pending() == 0);
        assert!(again.holds(standin, &again.expected(&site)), "{kind:?}, {method:?}, round {round}");
    }
    until("the arena is free", || site.arena.usage().used == 0);
}

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Memory of this process that is pinned, as the kernel counts it: kB of `VmPin` and `VmLck`.
fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let of = |line: &str| line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok());
    let lines = status.lines().filter(|line| line.starts_with("VmPin") || line.starts_with("VmLck"));
    lines.filter_map(of).sum()
}

#[test]
fn a_layer_that_landed_before_its_device_was_lost_ends_the_stream() {
    inside(Kit::Whole, here!(), |_standin| {
        let site = Site::with(true);
        let pipeline = site.pipeline(Method::ALL[0]);
        let (pool, compute) = (Pool::new(&site), site.device.stream().unwrap());
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        until("everything has landed", || landing.landed() as usize == LAYERS);
        site.device.declare_lost("it was pulled out");
        // No wait for a lost device is enqueued on an engine's stream.
        let next = landing.next_layer(&compute);
        assert!(matches!(next, Next::End(_)), "{next:?}");
    });
}

#[test]
fn a_device_that_fails_in_every_way_gives_right_bytes_or_a_reason_and_keeps_nothing() {
    inside(Kit::Whole, here!(), |standin| {
        let time = Duration::from_secs(crate::way::soak_seconds());
        let begin = Instant::now();
        // Held, or each round would make the device's context anew.
        let kept = Cuda::open(0).unwrap();
        let before = standin.live();
        let (mut rounds, mut first) = (0u64, None);
        while rounds == 0 || begin.elapsed() < time {
            for kind in KINDS {
                let method = Method::ALL[draw(rounds * 7 + kind as u64, 3) as usize];
                there(standin, kind, method, rounds);
                back(standin, kind, method, rounds);
                until("nothing is left", || standin.live() == before);
            }
            rounds += 1;
            // A driver has threads and pinned memory of its own from its first use on.
            first.get_or_insert_with(|| (threads(), pinned()));
        }
        let (threads_first, pinned_first) = first.unwrap();
        until("threads have ended", || threads() <= threads_first + 2);
        println!(
            "figure\t{{\"figure\":\"failures\",\"rounds\":{rounds},\"failures\":{},\"threads\":[{threads_first},{}],\"pinned_kb\":[{pinned_first},{}]}}",
            rounds * 2 * KINDS.len() as u64,
            threads(),
            pinned(),
        );
        assert!(pinned() <= pinned_first + 1024, "pinned memory grows");
        drop(kept);
    });
}
