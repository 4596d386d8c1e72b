//! Memory of another process: an engine's, which runs here as a second process with the stand-in.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;

use kvarts_gpudirect::device::cuda::Cuda;
use kvarts_gpudirect::device::{Device, Direction, IpcHandle, Method, Piece};
use kvarts_gpudirect::error::DeviceError;
use kvarts_gpudirect::ipc::Opened;

use crate::copies::{copy, host, pattern};
use crate::standin::{Kit, again, here, inside, is_inside};

const POOL: u64 = 10_000;

/// The other process, which has a pool and says under which name.
struct Engine {
    child: Child,
    tell: ChildStdin,
    said: BufReader<ChildStdout>,
    handle: IpcHandle,
}

impl Engine {
    fn start() -> Self {
        let mut command = again(Kit::Whole, "processes::an_engine_with_a_pool");
        command.arg("--ignored").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (tell, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (mut said, mut line) = (BufReader::new(stdout), String::new());
        while !line.starts_with("handle ") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "the engine has ended");
        }
        let hex = line.trim_start_matches("handle ").trim().as_bytes().chunks(2);
        let bytes: Vec<u8> =
            hex.map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect();
        Self { child, tell, said, handle: IpcHandle(bytes.try_into().unwrap()) }
    }

    /// Lets it look whether the bytes are there, free its pool and end.
    fn end(mut self) {
        self.tell.write_all(b"free it\n").unwrap();
        drop(self.tell);
        let mut rest = String::new();
        self.said.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success() && rest.contains("1 passed"), "{rest}");
    }
}

/// Not a test by itself: the process of the engine, started by those below.
#[test]
#[ignore = "the other process of the tests beside it"]
fn an_engine_with_a_pool() {
    if !is_inside(here!()) {
        return;
    }
    inside(Kit::Whole, here!(), |standin| {
        let device = Cuda::open(0).unwrap();
        let pool = device.allocate(POOL).unwrap();
        let handle = device.export(&pool).unwrap();
        assert_eq!(device.export(&pool), Ok(handle), "a memory has one name");
        let hex: String = handle.0.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("\nhandle {hex}");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        assert!(standin.peek(pool.base() + 100, 4096) == pattern(4096, 9), "what landed is here");
    });
}

#[test]
fn an_engines_pool_is_opened_once_landed_in_and_closed_before_it_is_freed() {
    inside(Kit::Whole, here!(), |standin| {
        let engine = Engine::start();
        let device = Cuda::open(0).unwrap();
        let opened = Opened::new(Arc::new(device.clone()));
        let first = opened.open(&engine.handle, POOL).unwrap();
        let second = opened.open(&engine.handle, POOL).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!((standin.calls("cuIpcOpenMemHandle_v2"), device.in_use().opened), (1, 1));
        let (region, buf) = host(4096);
        device.pin(&region).unwrap();
        buf.copy_in(0, &pattern(4096, 9));
        let (stream, memories) = (device.stream().unwrap(), [(*first).clone()]);
        let pieces = [Piece { memory: 0, at: 100, host: 0, len: 4096 }];
        copy(&device, &stream, Direction::ToDevice, Method::Batch, (&buf, &memories, &pieces)).unwrap();
        device.unpin(&region);
        drop((first, second));
        assert_eq!((standin.calls("cuIpcCloseMemHandle"), device.in_use().opened), (0, 1), "a batch has it");
        drop(memories);
        assert_eq!((standin.calls("cuIpcCloseMemHandle"), device.in_use().opened), (1, 0));
        // It may be opened again.
        drop(opened.open(&engine.handle, POOL).unwrap());
        assert_eq!(standin.calls("cuIpcCloseMemHandle"), 2);
        engine.end();
    });
}

#[test]
fn a_pool_that_is_smaller_than_was_said_is_closed_again() {
    inside(Kit::Whole, here!(), |standin| {
        let engine = Engine::start();
        let device = Cuda::open(0).unwrap();
        assert_eq!(device.import(&engine.handle, POOL + 1).unwrap_err(), DeviceError::OutOfBounds);
        standin.fail("cuPointerGetAttribute", 2, 1);
        assert!(matches!(device.import(&engine.handle, POOL), Err(DeviceError::Call { .. })));
        assert_eq!((standin.calls("cuIpcCloseMemHandle"), device.in_use().opened), (2, 0));
        // Of a name with one other byte a real driver said something else than this.
        let wrong = IpcHandle(engine.handle.0.map(|byte| !byte));
        let refused = device.import(&wrong, POOL);
        assert!(refused.is_err(), "{refused:?}");
        let (region, buf) = host(4096);
        device.pin(&region).unwrap();
        buf.copy_in(0, &pattern(4096, 9));
        let memory = device.import(&engine.handle, POOL).unwrap();
        let pieces = [Piece { memory: 0, at: 100, host: 0, len: 4096 }];
        let stream = device.stream().unwrap();
        let memories = std::slice::from_ref(&memory);
        copy(&device, &stream, Direction::ToDevice, Method::Kernel, (&buf, memories, &pieces)).unwrap();
        device.unpin(&region);
        drop(memory);
        engine.end();
    });
}

/// The driver gives a part of an allocation the name of the whole: a process that opens it would get other memory.
#[test]
fn only_whole_allocations_get_a_name_and_only_in_other_processes_it_is_opened() {
    inside(Kit::Whole, here!(), |_| {
        let device = Cuda::open(0).unwrap();
        let pool = device.allocate(4096).unwrap();
        let handle = device.export(&pool).unwrap();
        assert!(matches!(device.import(&handle, 4096), Err(DeviceError::Call { .. })));
        let inside = device.adopt(pool.base() + 64, 64).unwrap();
        assert!(matches!(device.export(&inside), Err(DeviceError::Foreign(_))));
        let front = device.adopt(pool.base(), 64).unwrap();
        assert!(matches!(device.export(&front), Err(DeviceError::Foreign(_))));
        let whole = device.adopt(pool.base(), 4096).unwrap();
        assert_eq!(device.export(&whole), Ok(handle));
    });
}
