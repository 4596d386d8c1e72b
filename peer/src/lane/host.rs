//! What the lane's threads run on: the machine's threads, connections and sleep, or those of a simulation, where one thread
//! runs at a time and time passes only while all of them sleep.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use super::bell::{self, Bell};
use super::wire::{Plain, Wire};

/// What of a wire is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ready {
    /// That something comes.
    ToReceive,
    /// That there is room.
    ToSend,
    /// Either.
    ForBoth,
}

/// Waits for the end of a thread.
pub type Join = Box<dyn FnOnce() + Send>;

/// Threads, connections and sleep.
pub trait Host: Send + Sync + fmt::Debug {
    /// Starts a thread.
    fn thread(&self, name: &'static str, body: Box<dyn FnOnce() + Send>) -> io::Result<Join>;
    /// Makes a connection to a node that serves bytes.
    fn connect(&self, address: SocketAddr, within: Duration) -> io::Result<Arc<dyn Wire>>;
    /// Sleeps until the bell is rung, or the wire is ready, or the time is over; perhaps not as long.
    fn sleep(&self, bell: Option<&Bell>, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>);
}

/// The machine that this runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Machine;

impl Host for Machine {
    fn thread(&self, name: &'static str, body: Box<dyn FnOnce() + Send>) -> io::Result<Join> {
        let thread = Builder::new().name(name.to_owned()).spawn(body)?;
        // A panic in it was reported.
        Ok(Box::new(move || drop(thread.join())))
    }

    fn connect(&self, address: SocketAddr, within: Duration) -> io::Result<Arc<dyn Wire>> {
        Ok(Arc::new(Plain::new(TcpStream::connect_timeout(&address, within)?)))
    }

    fn sleep(&self, bell: Option<&Bell>, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>) {
        bell::sleep(bell, wire, timeout);
    }
}
