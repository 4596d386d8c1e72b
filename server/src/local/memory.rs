//! The memories that a session shares with the server.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::buffers::{Region, shared};
use kvarts_contract::error::Reason;
use kvarts_store::engine::Store;

use tokio::runtime::Handle;

use super::Mode;
use super::pinned::{Pinned, Ready};
use crate::state::locals::Locals;
use crate::state::locals::kept::Watched;
use crate::state::locals::pools::{Name, Shared};
use crate::state::parts::Part;
use kvarts_wire::busy;
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

/// What is mapped, and what it counts as for as long as it is in use.
struct Given {
    file: OwnedFd,
    bytes: u64,
    counts: Box<dyn Any + Send + Sync>,
    /// The client has no descriptor of it yet.
    is_new: bool,
}

fn malformed(what: &str) -> Fault {
    Fault::malformed(format!("share: {what}"))
}

impl Memory {
    /// Maps what a client shares. Without a descriptor one is made, or found by the name of its pool, and is the second part of the
    /// answer; the third is what the client had better wait for.
    pub(super) fn share(
        (locals, tenant, store, elsewhere): (&Arc<Locals>, u32, &Store, &Handle),
        wire: &proto::ShareRequest,
        file: Option<OwnedFd>,
    ) -> Outcome<(Self, Option<OwnedFd>, Option<Ready>)> {
        let mode = Mode::from_wire(wire.mode)
            .ok_or_else(|| malformed("mode: direct, adopted or copied is required"))?;
        let name = match &wire.pool[..] {
            [] => None,
            name => Some(Name::try_from(name).map_err(|_| malformed("pool: the name must have 16 bytes"))?),
        };
        if name.is_some() && mode != Mode::Adopted {
            return Err(malformed("pool: a name is allowed only in adopted mode"));
        }
        let given = match (name, file) {
            (Some(name), None) => attached((locals, tenant), name, wire.bytes)?,
            (name, file) => given((locals, tenant), (mode, wire.bytes), name, file)?,
        };
        let Given { file, bytes, counts, is_new } = given;
        // The descriptor that stays is for the client, or to look at.
        let second = duplicate(&file)?;
        let mapped = shared::map_foreign(file, bytes, counts, &locals.reaper.0);
        let region = mapped
            .map_err(|error| malformed(&format!("the memory cannot be mapped for writing: {error}")))?;
        let (mine, theirs) = if is_new { (None, Some(second)) } else { (Some(second), None) };
        let pinned =
            is_pinned(mode).then(|| Pinned::begin((locals, tenant), store, (&region, mine), elsewhere));
        let (pinned, ready) = pinned.flatten().unzip();
        let client_verifies = wire.client_verifies || mode == Mode::Adopted;
        let memory = Self { region, mode, client_verifies, _pinned: pinned.map(Arc::new) };
        Ok((memory, theirs, ready))
    }
}

/// Whether the rings are told of memory of this mode: adopted memory is whatever the client has.
fn is_pinned(mode: Mode) -> bool {
    mode != Mode::Adopted
}

/// Refuses memory to a tenant that keeps too much of what the kernel charges to the server.
fn is_charged((locals, tenant): (&Arc<Locals>, u32)) -> Outcome<()> {
    // A tenant alone has nothing set aside for it.
    let part = locals.mapped.own(tenant).unwrap_or(locals.mapped_max());
    match locals.kept.is_refused(tenant, part) {
        false => Ok(()),
        true => Err(Fault::busy(busy::MEMORY_KEPT)),
    }
}

/// Another descriptor of a file.
fn duplicate(file: &OwnedFd) -> Outcome<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(file, 0).map_err(|_| {
        Fault::busy(
            "the server's limit of open files is reached: share fewer memory regions, or raise the limit \
            (ulimit -n)",
        )
    })
}

/// This many open files of memory.
fn files((locals, tenant): (&Arc<Locals>, u32), count: u64) -> Outcome<Part> {
    let files = locals.files.try_take(tenant, count);
    files.ok_or_else(|| {
        Fault::busy(
            "the server's limit of shared memory regions is reached: unshare regions that are \
            not in use",
        )
    })
}

/// A client's own file, or one that is made for it; with a name, a pool that others share after it.
fn given(
    of: (&Arc<Locals>, u32),
    (mode, bytes): (Mode, u64),
    name: Option<Name>,
    file: Option<OwnedFd>,
) -> Outcome<Given> {
    let (locals, tenant) = of;
    if bytes == 0 || !bytes.is_multiple_of(PAGE as u64) {
        return Err(malformed(&format!("bytes: the size must be a multiple of 4096 above 0, not {bytes}")));
    }
    if file.is_none() && mode == Mode::Adopted {
        return Err(malformed("mode adopted: the request must include a descriptor of the client's memory"));
    }
    let part = || locals.mapped.try_take(tenant, bytes).ok_or(Reason::TooMany("bytes"));
    // What is to be registered has a second one until it is.
    let open = files(of, if is_pinned(mode) { 2 } else { 1 })?;
    let Some(file) = file else {
        let part = part()?;
        if !locals.make(bytes) {
            return Err(Fault::busy(
                "the server cannot allocate more shared memory: share a memfd of the client instead, sealed \
                against shrinking",
            ));
        }
        let file =
            shared::sealed(bytes).map_err(|_| Fault::busy("the shared memory could not be allocated"))?;
        return Ok(Given { file, bytes, counts: Box::new((part, open)), is_new: true });
    };
    // An engine's file of `/dev/shm` cannot be sealed; no touch of this process depends on its length. Those of a pool's other processes do.
    let may_shrink = mode == Mode::Adopted && name.is_none();
    let length = if may_shrink { shared::length_now(&file) } else { shared::length(&file) };
    if bytes > length.map_err(malformed)? {
        return Err(malformed("bytes: the file of the shared memory is shorter than the given size"));
    }
    let Some(name) = name else {
        is_charged(of)?;
        let watched = match locals.kept.is_limited() {
            true => Some((Watched::new(&locals.kept, tenant, (duplicate(&file)?, bytes)), files(of, 1)?)),
            false => None,
        };
        return Ok(Given { file, bytes, counts: Box::new((part()?, open, watched)), is_new: false });
    };
    // One that is known is counted already.
    let pool = match locals.pools.find(tenant, name) {
        Some(known) => known.is(&file, bytes).then_some(known),
        None => {
            is_charged(of)?;
            let watched = Watched::new(&locals.kept, tenant, (duplicate(&file)?, bytes));
            locals.pools.name((tenant, name), (watched, bytes), (part()?, files(of, 1)?))
        }
    };
    let pool = pool.ok_or_else(|| malformed("pool: another pool has this name"))?;
    has_room(&pool)?;
    Ok(Given { file, bytes, counts: Box::new((pool, open)), is_new: false })
}

/// Each session that shares a pool has a mapping of it.
fn has_room(pool: &Shared) -> Outcome<()> {
    match pool.is_full() {
        false => Ok(()),
        true => Err(Fault::busy("the limit of sessions for this pool is reached")),
    }
}

/// A pool that another session of the tenant shares.
fn attached(of: (&Arc<Locals>, u32), name: Name, bytes: u64) -> Outcome<Given> {
    let (locals, tenant) = of;
    let pool = locals.pools.find(tenant, name);
    let pool = pool.ok_or_else(|| malformed("pool: no session has a pool of this name"))?;
    if bytes != 0 && bytes != pool.bytes() {
        return Err(malformed("bytes: the given size differs from the size of the pool"));
    }
    has_room(&pool)?;
    let open = files(of, 1)?;
    let file = duplicate(pool.file())?;
    Ok(Given { file, bytes: pool.bytes(), counts: Box::new((pool, open)), is_new: true })
}
