//! A device that is lost in the middle: other code in this process destroys its context, with layers on their way. What a
//! driver says then, and to which calls, only a driver can show; that a stream ends and no thread hangs is shown here.

use std::time::Duration;

use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Device, Method};
use kvarts_gpudirect::error::EndReason;
use kvarts_gpudirect::pipeline::Next;

use crate::pipeline::{LAYERS, Pool, Site};
use crate::standin::{Kit, here, inside, until};
use crate::way::is_real;

#[test]
fn a_context_that_is_destroyed_in_the_middle_ends_the_stream_with_a_reason() {
    inside(Kit::Whole, here!(), |standin| {
        let site = Site::new();
        let (pipeline, pool) = (site.pipeline(Method::Each), Pool::new(&site));
        let pipeline = pipeline.with_copy_timeout(Duration::from_secs(2));
        let compute = site.device.stream().unwrap();
        // The first copies stand still, so that nothing of it has landed.
        let copies = standin.latest() + 1;
        standin.stand(copies);
        let mut landing = site.land(&pipeline, 1, &pool).unwrap();
        assert!(matches!(landing.next_layer(&compute), Next::Layer(layer) if layer.layer == 0));
        if is_real() {
            // A driver waits for the context's work before it destroys it.
            standin.go(copies);
        }
        let said = standin.direct("cuDevicePrimaryCtxReset_v2", [0; 4]);
        let end = loop {
            if let Next::End(end) = landing.next_layer(&compute) {
                break end;
            }
        };
        standin.go(copies);
        println!("the context was destroyed ({said}), and the stream ended: {end:?}");
        if is_real() {
            // All of it may have landed before.
            assert!(end.usable_layers == LAYERS as u32 || end.reason.is_some(), "{end:?}");
        } else {
            assert!(matches!(end.reason, Some(EndReason::Device(_))), "{end:?}");
        }
        println!("and a stream is asked for: {:?}", site.device.stream().map(drop));
        drop(landing);
        until("the arena is free", || site.arena.usage().used == 0);
        drop((compute, pipeline, pool, site));
        if is_real() {
            // What the books say of a context that other code has destroyed is not judged here.
            println!("and the device is opened anew: {:?}", Cuda::open(0).map(drop));
            crate::way::passed_and_nothing_to_settle();
        }
    });
}
