//! The memories that a session shares with the server.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvarts_contract::buffers::{Region, shared};
use kvarts_contract::error::Reason;
use kvarts_store::engine::Store;

use tokio::runtime::Handle;

use super::pinned::{Pinned, Ready};
use super::{Locals, Mode};
use kvarts_wire::fault::{Fault, Outcome};
use kvarts_wire::proto;

/// A memory, mapped for as long as it is in use.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) region: Arc<Region>,
    pub(super) mode: Mode,
    /// The server does not look at what disks wrote there.
    pub(super) client_verifies: bool,
    _pinned: Option<Arc<Pinned>>,
}

impl Memory {
    /// Maps what a client shares. Without a descriptor one is made, and is the second part of the answer; the third is what
    /// the client had better wait for.
    pub(super) fn share(
        (locals, tenant, store, elsewhere): (&Arc<Locals>, u32, &Store, &Handle),
        wire: &proto::ShareRequest,
        file: Option<OwnedFd>,
    ) -> Outcome<(Self, Option<OwnedFd>, Option<Ready>)> {
        let malformed = |what: &str| Fault::malformed(format!("share: {what}"));
        let mode =
            Mode::from_wire(wire.mode).ok_or_else(|| malformed("mode: say direct, adopted or copied"))?;
        if wire.bytes == 0 || !wire.bytes.is_multiple_of(kvarts_contract::buffers::region::PAGE as u64) {
            return Err(malformed("bytes: whole pages of 4096, at least one"));
        }
        if file.is_none() && mode == Mode::Adopted {
            return Err(malformed("adopted memory is the client's: a descriptor comes with it"));
        }
        let part = locals.mapped.try_take(tenant, wire.bytes).ok_or(Reason::TooMany("bytes"))?;
        // Adopted memory is whatever the client has.
        let is_pinned = mode != Mode::Adopted;
        // What is to be registered has a second one until it is.
        let files = if is_pinned { 2 } else { 1 };
        let files = locals.files.try_take(tenant, files);
        let files = files
            .ok_or_else(|| Fault::busy("as many memories are shared as the server has open files for"))?;
        let made = file.is_none();
        let file = match file {
            Some(file) => {
                // An engine's file of `/dev/shm` cannot be sealed; no touch of this process depends on its length.
                let length =
                    if mode == Mode::Adopted { shared::length_now(&file) } else { shared::length(&file) };
                let length = length.map_err(malformed)?;
                if wire.bytes > length {
                    return Err(malformed("the file is shorter than that"));
                }
                file
            }
            None if locals.make(wire.bytes) => {
                shared::sealed(wire.bytes).map_err(|_| Fault::busy("the server has no memory to share"))?
            }
            None => {
                return Err(Fault::busy(
                    "the server makes no more memory: share a file in memory of your own, sealed against shrinking",
                ));
            }
        };
        // The descriptor that stays is for the client, or to look at.
        let second = rustix::io::fcntl_dupfd_cloexec(&file, 0);
        let second = second.map_err(|_| Fault::busy("the server has no descriptor left"))?;
        let mapped = shared::map_foreign(file, wire.bytes, Box::new((part, files)), &locals.reaper.0);
        let region =
            mapped.map_err(|error| malformed(&format!("it cannot be mapped for writing: {error}")))?;
        let (mine, theirs) = if made { (None, Some(second)) } else { (Some(second), None) };
        let pinned = is_pinned.then(|| Pinned::begin((locals, tenant), store, (&region, mine), elsewhere));
        let (pinned, ready) = pinned.flatten().unzip();
        let client_verifies = wire.client_verifies || mode == Mode::Adopted;
        let memory = Self { region, mode, client_verifies, _pinned: pinned.map(Arc::new) };
        Ok((memory, theirs, ready))
    }
}
