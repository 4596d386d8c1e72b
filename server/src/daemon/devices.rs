//! How files reach the memory of devices on this host: found out once, at the start.
//!
//! The server moves nothing to a device itself, so it calls no driver: one that hangs would leave a thread that cannot be
//! killed, and with it a process that keeps the store's lock. What is looked at is what the machine shows in files.

use kvarts_gpudirect::cufile::{self, Decision, Found, Mode, Wish};
use kvarts_gpudirect::device::cuda;

/// Looks and decides. What is missing is a reason and no error, unless it was asked for by name.
pub(super) fn decide(wish: Wish) -> Result<Decision, String> {
    let found = match wish {
        Wish::Only(Mode::Staging) => {
            let not_needed = "not checked, because device.cufile is set to staging".to_owned();
            Found { device: Err(not_needed), library: false, module: false }
        }
        _ => cufile::look(cuda::shown()),
    };
    cufile::decide(&found, wish).map_err(|why| format!("device.cufile: {why}"))
}
