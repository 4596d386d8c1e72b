//! A connection that encrypts: TLS 1.3 over TCP, both sides with the certificate of a node.
//!
//! Bytes are copied once on each side, between the records and their places. What is sealed belongs to the stream: when the socket
//! takes less than a whole record the caller is told that there was no room, and comes again with the same bytes, as it does
//! anyhow; they are not sealed again.

use std::fmt;
use std::io::{self, BufRead, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_contract::buffers::stream::Stretch;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_layout::StoreId;
use rustix::io::Errno;
use tokio_rustls::rustls::{ClientConnection, Connection, Error, ServerConnection};

use super::wire::{Broken, Host, Ready, Wire};
use crate::credentials::{self, Credentials, Purpose};

/// Bytes that are sealed at once, some records.
const AT_ONCE: usize = 64 << 10;
/// How often the socket is asked in one call for records that bring nothing. Then who called sees to the time.
const ROUNDS: usize = 64;

struct Session {
    tls: Connection,
    /// Bytes of the caller in records that the socket has not taken yet.
    sealed: usize,
    /// Why nothing more comes or goes.
    broken: Option<Broken>,
    /// What is sealed next, where it has to be gathered.
    gathered: Vec<u8>,
}

/// TLS over TCP.
pub(super) struct Secured {
    plain: Arc<dyn Wire>,
    session: Mutex<Session>,
}

impl fmt::Debug for Secured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secured({:?})", self.plain)
    }
}

/// A socket that is not waited for.
struct Unwaited<'a>(&'a dyn Wire);

impl Read for Unwaited<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(self.0.receive(into)?)
    }
}

impl Write for Unwaited<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.0.send(bytes, false)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(match error.kind() {
        io::ErrorKind::WouldBlock => Errno::AGAIN,
        io::ErrorKind::Interrupted => Errno::INTR,
        _ => Errno::IO,
    })
}

fn refused(error: &Error) -> Broken {
    Broken::Refused(credentials::told(error))
}

impl Session {
    /// Has the socket take what is sealed.
    fn flush(&mut self, plain: &dyn Wire) -> Result<(), Errno> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut Unwaited(plain)).map_err(|error| errno(&error))?;
        }
        Ok(())
    }

    /// Takes records that have come. False at the end of the stream.
    fn take(&mut self, plain: &dyn Wire) -> Result<bool, Errno> {
        let got = self.tls.read_tls(&mut Unwaited(plain)).map_err(|error| errno(&error))?;
        if let Err(error) = self.tls.process_new_packets() {
            // Why is said to the other side, if it can be.
            let _ = self.flush(plain);
            self.broken.get_or_insert(refused(&error));
            return Err(Errno::PROTO);
        }
        // An answer to what came, to new keys for example; what there is no room for goes with the next bytes.
        let _ = self.flush(plain);
        Ok(got > 0)
    }

    /// Gives bytes that have come to `place`, which says how many it took.
    fn receive(&mut self, plain: &dyn Wire, place: &mut dyn FnMut(&[u8]) -> usize) -> Result<usize, Errno> {
        for _ in 0..ROUNDS {
            let mut reader = self.tls.reader();
            match reader.fill_buf() {
                Ok(bytes) => {
                    let taken = place(bytes);
                    reader.consume(taken);
                    return Ok(taken);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The stream ended without a word; frames say how long they are.
                Err(_) => return Ok(0),
            }
            if !self.take(plain)? {
                return Ok(0);
            }
        }
        Err(Errno::AGAIN)
    }

    /// Seals and sends some bytes. Where the socket takes less, these are the bytes of the next call.
    fn send(&mut self, plain: &dyn Wire, bytes: &[u8]) -> Result<usize, Errno> {
        self.flush(plain)?;
        if self.sealed == 0 {
            let some = bytes.get(..bytes.len().min(AT_ONCE)).unwrap_or_default();
            self.sealed = self.tls.writer().write(some).map_err(|error| errno(&error))?;
            self.flush(plain)?;
        }
        Ok(std::mem::take(&mut self.sealed))
    }
}

impl Secured {
    /// Calls this node.
    pub(super) fn calling(
        plain: Arc<dyn Wire>,
        credentials: &Credentials,
        peer: StoreId,
    ) -> Result<Self, Broken> {
        let name = credentials::server_name(peer).ok_or(Broken::Protocol("the name of the node is empty"))?;
        let tls = ClientConnection::new(credentials.client(Purpose::Lane), name);
        Ok(Self::over(plain, tls.map_err(|error| refused(&error))?.into()))
    }

    /// Was called by a node.
    pub(super) fn called(plain: Arc<dyn Wire>, credentials: &Credentials) -> Result<Self, Broken> {
        let tls = ServerConnection::new(credentials.server(Purpose::Lane));
        Ok(Self::over(plain, tls.map_err(|error| refused(&error))?.into()))
    }

    fn over(plain: Arc<dyn Wire>, tls: Connection) -> Self {
        let session = Session { tls, sealed: 0, broken: None, gathered: Vec::new() };
        Self { plain, session: Mutex::new(session) }
    }

    fn lock(&self) -> MutexGuard<'_, Session> {
        // A panic while it is held would be in code that cannot.
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing more comes or goes, if TLS is why.
    pub(super) fn trouble(&self) -> Option<Broken> {
        self.lock().broken
    }

    /// One step of the first words; what is waited for, or nothing when they are over.
    fn step(&self) -> Result<Option<Ready>, Broken> {
        let mut session = self.lock();
        match session.flush(&*self.plain) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Some(Ready::ToSend)),
            Err(_) => return Err(Broken::Gone),
        }
        if !session.tls.is_handshaking() {
            return Ok(None);
        }
        match session.take(&*self.plain) {
            Ok(true) => Ok(session.tls.is_handshaking().then_some(Ready::ToReceive)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Some(Ready::ToReceive)),
            Ok(false) | Err(_) => Err(session.broken.unwrap_or(Broken::Gone)),
        }
    }
}

impl Wire for Secured {
    fn greet(&self, host: &dyn Host, clock: &dyn Clock, until: Nanos) -> Result<(), Broken> {
        while let Some(ready) = self.step()? {
            let left = until.since(clock.now());
            if left.is_zero() {
                return Err(Broken::Silent);
            }
            host.sleep(None, Some((self, ready)), Some(left));
        }
        Ok(())
    }

    fn is_of(&self, node: StoreId) -> bool {
        let session = self.lock();
        let shown = session.tls.peer_certificates().and_then(|chain| chain.first());
        shown.is_some_and(|certificate| credentials::names(certificate, node))
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.plain.descriptor()
    }

    fn receive(&self, into: &mut [u8]) -> Result<usize, Errno> {
        self.lock().receive(&*self.plain, &mut |bytes| {
            let len = bytes.len().min(into.len());
            if let (Some(place), Some(some)) = (into.get_mut(..len), bytes.get(..len)) {
                place.copy_from_slice(some);
            }
            len
        })
    }

    fn receive_into(&self, into: &mut Stretch) -> Result<usize, Errno> {
        self.lock().receive(&*self.plain, &mut |bytes| into.fill(bytes))
    }

    fn send(&self, bytes: &[u8], _more: bool) -> Result<usize, Errno> {
        self.lock().send(&*self.plain, bytes)
    }

    fn send_from(&self, from: &mut Stretch) -> Result<usize, Errno> {
        let mut session = self.lock();
        let mut gathered = std::mem::take(&mut session.gathered);
        if session.sealed == 0 {
            gathered.resize(AT_ONCE, 0);
            let some = from.copy_out(&mut gathered);
            gathered.truncate(some);
        }
        let sent = session.send(&*self.plain, &gathered);
        session.gathered = gathered;
        drop(session);
        if let Ok(sent) = sent {
            from.pass(sent);
        }
        sent
    }

    fn close(&self) {
        self.plain.close();
    }
}
