//! What the emulated device promises: order, times, checks and faults.

use super::super::drain;
use super::*;
use crate::pace::ModelPace;

fn device(faults: Faults) -> (Emulated, Arc<ModelPace>) {
    let pace = Arc::new(ModelPace::default());
    let model = Model { strict: true, ..Model::default() };
    (Emulated::with(model, faults, Arc::<ModelPace>::clone(&pace)), pace)
}

fn host(bytes: &[u8]) -> SharedBuf {
    let buf = SharedBuf::new(&Region::anonymous(bytes.len()).unwrap(), 0, bytes.len()).unwrap();
    buf.copy_in(0, bytes);
    buf
}

fn batch<'a>(host: &'a SharedBuf, memories: &'a [Memory], pieces: &'a [Piece]) -> Batch<'a> {
    Batch { direction: Direction::ToDevice, method: Method::Each, host, memories, pieces }
}

const WHOLE: Piece = Piece { memory: 0, at: 0, host: 0, len: 8 };

#[test]
fn bytes_arrive_and_come_back_and_everything_is_given_back() {
    let (device, pace) = device(Faults::default());
    {
        let memory = [device.allocate(16).unwrap()];
        let stream = device.stream().unwrap();
        let source = host(b"abcdefgh");
        device.copy(&stream, &batch(&source, &memory, &[Piece { at: 4, ..WHOLE }])).unwrap();
        let back = host(&[0; 8]);
        let pieces = [Piece { at: 4, ..WHOLE }];
        let home = Batch { direction: Direction::ToHost, ..batch(&back, &memory, &pieces) };
        device.copy(&stream, &home).unwrap();
        drain(&device, &stream).unwrap();
        assert_eq!(back.to_vec(), b"abcdefgh");
        assert_eq!(device.peek(&memory[0], 2, 4).unwrap(), b"\0\0ab");
        assert!(pace.now() >= Nanos(10_000), "two calls take twice a call's time");
        assert_eq!(device.in_use(), InUse { memories: 1, streams: 1, ..InUse::default() });
    }
    assert_eq!(device.in_use(), InUse::default());
}

#[test]
fn a_read_before_the_copy_is_finished_is_a_hazard_and_one_behind_its_event_is_not() {
    for waits in [false, true] {
        // The copy stream is held back by an event that is recorded last.
        let (device, _) = device(Faults::default());
        let memory = [device.allocate(8).unwrap()];
        let (copies, compute, gate) =
            (device.stream().unwrap(), device.stream().unwrap(), EventState::default());
        let gate = Arc::new(gate);
        queue_of(&copies).unwrap().push(Op::Wait(Arc::clone(&gate))).unwrap();
        let source = host(b"abcdefgh");
        device.copy(&copies, &batch(&source, &memory, &[WHOLE])).unwrap();
        let done = device.record(&copies).unwrap();
        if waits {
            device.wait(&compute, &done).unwrap();
        }
        device.touch(&compute, &memory[0], 7, 1).unwrap();
        if !waits {
            drain(&device, &compute).unwrap();
        }
        let opener = device.stream().unwrap();
        queue_of(&opener).unwrap().push(Op::Record(gate)).unwrap();
        drain(&device, &compute).unwrap();
        assert_eq!(device.hazards(), u64::from(!waits));
    }
}

#[test]
fn a_partial_copy_and_a_lost_device_are_told_at_the_event() {
    let (device, _) = device(Faults { partial_copy: Some(0), lost_at_copy: Some(1), ..Faults::default() });
    let memory = [device.allocate(8).unwrap()];
    let source = host(b"abcdefgh");
    let stream = device.stream().unwrap();
    device.copy(&stream, &batch(&source, &memory, &[WHOLE])).unwrap();
    assert_eq!(drain(&device, &stream), Err(DeviceError::Partial { wanted: 8, moved: 4 }));
    let stream = device.stream().unwrap();
    device.copy(&stream, &batch(&source, &memory, &[WHOLE])).unwrap();
    assert!(matches!(drain(&device, &stream), Err(DeviceError::Lost(_))));
    assert!(matches!(device.allocate(1), Err(DeviceError::Lost(_))));
}

#[test]
fn what_the_device_cannot_take_is_refused_before_it_is_enqueued() {
    let pace = Arc::new(ModelPace::default());
    let model = Model { align: 4, memory_bytes: 64, ..Model::default() };
    let device = Emulated::with(model, Faults::default(), pace);
    let memory = [device.allocate(8).unwrap()];
    let (source, stream) = (host(b"abcdefgh"), device.stream().unwrap());
    let refused = |piece| device.copy(&stream, &batch(&source, &memory, &[piece])).unwrap_err();
    assert!(matches!(refused(Piece { at: 2, len: 4, ..WHOLE }), DeviceError::Misaligned { align: 4, .. }));
    assert_eq!(refused(Piece { at: 4, ..WHOLE }), DeviceError::OutOfBounds);
    assert_eq!(refused(Piece { host: u64::MAX, ..WHOLE }), DeviceError::OutOfBounds);
    assert_eq!(refused(Piece { memory: 1, ..WHOLE }), DeviceError::OutOfBounds);
    assert_eq!(device.allocate(57).unwrap_err(), DeviceError::NoMemory(57));
    assert!(device.adopt(memory[0].base() + 4, 4).is_ok());
    assert_eq!(device.adopt(memory[0].base() + 4, 5).unwrap_err(), DeviceError::OutOfBounds);
}

#[test]
fn the_model_charges_each_method_as_it_says() {
    let model = Model { bytes_per_second: 1_000_000_000, ..Model::default() };
    let micros = |method| model.time(method, 100, 1_000_000).as_micros();
    assert_eq!(Method::ALL.map(micros), [1500, 1045, 1255]);
}
