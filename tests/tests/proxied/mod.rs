//! A wire between a client and a server that ends after any byte, either way, and remembers what a client said.
//!
//! One connection at a time is meant to be under way: bytes of all connections are counted together.
#![allow(dead_code, reason = "each program of tests that includes this uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "real sockets and threads stand outside the simulation")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// To the server.
    Up,
    /// To the client.
    Down,
}

/// How a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cut {
    /// Both ends are reset.
    Reset,
    /// Both ends are closed, as when a process dies that has read everything.
    Close,
    /// The receiver of the bytes is told that no more come; the other way stays open.
    Half,
    /// The receiver is not told: nothing more comes that way, and both ends stay open.
    Still,
}

impl Cut {
    /// Each of them in turn.
    pub(crate) fn turn(number: usize) -> Self {
        [Self::Reset, Self::Close, Self::Half][number % 3]
    }
}

#[derive(Debug)]
struct Armed {
    way: Way,
    left: usize,
    cut: Cut,
}

#[derive(Debug, Default)]
struct Wire {
    armed: Option<Armed>,
    spoils: Option<(Way, Vec<u8>)>,
    /// Bytes until the one that is changed, and which of its bits are.
    flips: Option<(Way, usize, u8)>,
    up: Vec<u8>,
    down: usize,
}

/// The wire.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// Where clients connect to.
    pub(crate) at: SocketAddr,
    wire: Arc<Mutex<Wire>>,
}

fn lock(wire: &Mutex<Wire>) -> MutexGuard<'_, Wire> {
    wire.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Proxy {
    /// A wire to the server at `to`. Its threads end with the process.
    pub(crate) fn start(to: SocketAddr) -> Self {
        Self::on(TcpListener::bind(("127.0.0.1", 0)).unwrap(), to, Arc::default())
    }

    /// Another way in: to the server at `to`, from where `listener` is. Bytes of both are counted together.
    pub(crate) fn beside(&self, listener: TcpListener, to: SocketAddr) -> Self {
        Self::on(listener, to, Arc::clone(&self.wire))
    }

    fn on(listener: TcpListener, to: SocketAddr, wire: Arc<Mutex<Wire>>) -> Self {
        let at = listener.local_addr().unwrap();
        let shared = Arc::clone(&wire);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { continue };
                for stream in [&client, &server] {
                    stream.set_nodelay(true).unwrap();
                }
                let ends = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (up, down) = (Arc::clone(&shared), Arc::clone(&shared));
                std::thread::spawn(move || relay(&ends.0, &ends.1, Way::Up, &up));
                std::thread::spawn(move || relay(&server, &client, Way::Down, &down));
            }
        });
        Self { at, wire }
    }

    /// Where clients connect to, as an address of the web.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.at)
    }

    /// Ends the connection after `bytes` more that way; at the first byte if there are none.
    pub(crate) fn cut_after(&self, way: Way, bytes: usize, cut: Cut) {
        lock(&self.wire).armed = Some(Armed { way, left: bytes, cut });
    }

    /// Whether the connection was ended since; from now on none is.
    pub(crate) fn was_cut(&self) -> bool {
        lock(&self.wire).armed.take().is_none()
    }

    /// Flips a bit of these bytes when they come by that way, once.
    pub(crate) fn spoil(&self, way: Way, bytes: &[u8]) {
        lock(&self.wire).spoils = Some((way, bytes.to_vec()));
    }

    /// Whether they came by since; from now on none are changed.
    pub(crate) fn was_spoiled(&self) -> bool {
        lock(&self.wire).spoils.take().is_none()
    }

    /// Changes these bits of the byte that comes by that way after `bytes` more, once.
    pub(crate) fn flip(&self, way: Way, bytes: usize, bits: u8) {
        lock(&self.wire).flips = Some((way, bytes, bits));
    }

    /// Whether it came by since; from now on none is changed.
    pub(crate) fn was_flipped(&self) -> bool {
        lock(&self.wire).flips.take().is_none()
    }

    /// Bytes that went up and down since this was asked last, and what went up.
    pub(crate) fn carried(&self) -> (Vec<u8>, usize) {
        let mut wire = lock(&self.wire);
        (std::mem::take(&mut wire.up), std::mem::take(&mut wire.down))
    }
}

/// Carries bytes one way until there are no more, or the wire is cut.
fn relay(mut from: &TcpStream, mut to: &TcpStream, way: Way, wire: &Mutex<Wire>) {
    let mut bytes = [0; 16384];
    loop {
        let count = from.read(&mut bytes).unwrap_or(0);
        if count == 0 {
            // It may be gone in both directions already.
            let _ = to.shutdown(Shutdown::Write);
            return;
        }
        let (some, cut) = allowed(&mut lock(wire), way, &mut bytes[..count]);
        let sent = to.write_all(&bytes[..some]);
        match cut {
            Some(cut @ (Cut::Half | Cut::Still)) => {
                if cut == Cut::Half {
                    let _ = to.shutdown(Shutdown::Write);
                }
                // What comes after is read and dropped, so that the sender is not held up.
                while from.read(&mut bytes).unwrap_or(0) > 0 {}
                return;
            }
            Some(cut) => return end(&[from, to], cut),
            None if sent.is_err() => return end(&[from, to], Cut::Close),
            None => {}
        }
    }
}

/// How many of these bytes may go on, and how the connection ends after them.
fn allowed(wire: &mut Wire, way: Way, bytes: &mut [u8]) -> (usize, Option<Cut>) {
    let (mut some, mut cut) = (bytes.len(), None);
    if let Some((_, pattern)) = wire.spoils.as_ref().filter(|spoils| spoils.0 == way)
        && let Some(at) = bytes.windows(pattern.len()).position(|window| window == pattern)
    {
        bytes[at] ^= 0x10;
        wire.spoils = None;
    }
    if let Some((_, left, bits)) = wire.flips.as_mut().filter(|flips| flips.0 == way) {
        match bytes.get_mut(*left) {
            Some(byte) => {
                *byte ^= *bits;
                wire.flips = None;
            }
            None => *left -= bytes.len(),
        }
    }
    if let Some(armed) = wire.armed.as_mut().filter(|armed| armed.way == way) {
        some = some.min(armed.left);
        armed.left -= some;
        if armed.left == 0 {
            cut = wire.armed.take().map(|armed| armed.cut);
        }
    }
    match way {
        Way::Up => wire.up.extend_from_slice(&bytes[..some]),
        Way::Down => wire.down += some,
    }
    (some, cut)
}

fn end(streams: &[&TcpStream], cut: Cut) {
    for stream in streams {
        // Either may be gone already. To connect a stream to no address resets it at once, even if other code
        // holds it too.
        let _ = match cut {
            Cut::Reset => rustix::net::connect_unspec(stream).map_err(Into::into),
            _ => stream.shutdown(Shutdown::Both),
        };
    }
}

/// How many threads of servers in this process have panicked since this was called first. A server catches the panics of
/// its calls; they are defects all the same.
pub(crate) fn panics() -> usize {
    static COUNTED: AtomicUsize = AtomicUsize::new(0);
    static BEGIN: Once = Once::new();
    BEGIN.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let thread = std::thread::current();
            if thread.name().is_some_and(|name| name.starts_with("tokio") || name.starts_with("kvarts")) {
                COUNTED.fetch_add(1, Ordering::SeqCst);
            }
            before(panic);
        }));
    });
    COUNTED.load(Ordering::SeqCst)
}
