//! GPUDirect Storage: whether files are read straight into device memory on this machine, decided once at the start.
//!
//! The decision is told to the operator and exported as a metric, so that a missing module is known at the start and not at
//! the first read. The device must verify what is read this way: where memory is made ready for it, the device is asked to
//! digest a page before the path is called usable. Whether reads of a file system come straight is seen by the first of
//! them, not by what is installed: cuFile goes through the processor's memory where it must, and says nothing.
//! It has run on machines with a GPU in the compatibility mode of cuFile only.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::device::{Device, Route, cuda};
use crate::device_arena::DeviceArena;
use crate::error::DeviceError;

/// What a device is asked to digest before it is relied on to: less than any arena has.
const PAGE: u64 = 4096;

/// A way for bytes to reach the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The disk writes to device memory (nvidia-fs).
    Direct,
    /// cuFile reads through memory of its own.
    Compatibility,
    /// The store reads into the arena, and copies go from there.
    Staging,
}

impl Mode {
    /// As it is printed and exported.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Compatibility => "compatibility",
            Self::Staging => "staging",
        }
    }
}

/// What an operator asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wish {
    /// The best way that verifies every layer.
    #[default]
    Auto,
    /// This way or none.
    Only(Mode),
}

impl FromStr for Wish {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "direct" => Ok(Self::Only(Mode::Direct)),
            "compatibility" => Ok(Self::Only(Mode::Compatibility)),
            "staging" => Ok(Self::Only(Mode::Staging)),
            _ => Err(format!("the mode {name:?} does not exist: use auto, direct, compatibility or staging")),
        }
    }
}

/// What was found on the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Whether there is a CUDA device; if not, why, in a sentence.
    pub device: Result<(), String>,
    /// Whether libcufile can be loaded.
    pub library: bool,
    /// Whether the nvidia-fs module is loaded.
    pub module: bool,
}

/// What was decided, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decision {
    /// What is used.
    pub mode: Mode,
    /// The best that the machine offers.
    pub offered: Mode,
    /// Why, in a sentence.
    pub reason: String,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the mode of reads into device memory is {} ({})", self.mode.name(), self.reason)
    }
}

/// Looks at the machine without using anything that may be missing.
pub fn look(device: Result<(), String>) -> Found {
    let module = cuda::has_nvidia_fs();
    Found { library: cuda::has_cufile(), device, module }
}

/// Decides. A way that was asked for by name and cannot be used is an error that says what is missing.
pub fn decide(found: &Found, wish: Wish) -> Result<Decision, String> {
    let (offered, why) = match found {
        Found { device: Err(why), .. } => (Mode::Staging, why.clone()),
        Found { library: false, .. } => (Mode::Staging, "libcufile cannot be loaded".to_owned()),
        Found { module: false, .. } => (Mode::Compatibility, "the nvidia-fs module is not loaded".to_owned()),
        _ => (Mode::Direct, "nvidia-fs and libcufile are available".to_owned()),
    };
    let decided = |mode, reason| Ok(Decision { mode, offered, reason });
    match wish {
        Wish::Auto => match offered {
            Mode::Compatibility => decided(
                Mode::Staging,
                format!("{why}, so cuFile would copy through host memory, as staging does"),
            ),
            mode => decided(mode, why),
        },
        Wish::Only(Mode::Staging) => decided(Mode::Staging, "requested".to_owned()),
        Wish::Only(mode) if mode == offered => decided(mode, "requested".to_owned()),
        // Newer kernels do it without the module. Whether this one does, the first read says.
        Wish::Only(Mode::Direct) if offered == Mode::Compatibility => decided(
            Mode::Direct,
            format!(
                "requested; {why}, so reads are direct only if the kernel itself supports direct \
                reads into device memory"
            ),
        ),
        Wish::Only(Mode::Compatibility) if offered == Mode::Direct => {
            Err("compatibility reads cannot be used, because nvidia-fs is loaded and cuFile reads \
            directly: use the mode `direct`, or force compatibility mode in the configuration of \
            cuFile"
                .to_owned())
        }
        Wish::Only(mode) => {
            Err(format!("reads in the mode {} cannot be used ({why}): use auto or staging", mode.name()))
        }
    }
}

/// Why a device is of no use for verifying what it reads.
fn cannot_digest(why: &str) -> String {
    format!("{why}, so digests cannot be computed on the device")
}

/// The same of a way that was asked for by name.
fn unverified(why: &str) -> String {
    format!("requested; {}, so requests that verify every chunk read through host memory", cannot_digest(why))
}

/// Makes ready what was decided: memory of a device that files are read into, or nothing where they come through the
/// host's arena. Where that fails it is an error only if the way was asked for by name; else it is decided anew. The
/// device is asked to digest a page of it: one that cannot is used only if it was asked for by name, and the reason says
/// what that means.
pub fn prepare(
    decision: Decision,
    wish: Wish,
    device: &Arc<dyn Device>,
    bytes: u64,
) -> Result<(Decision, Option<DeviceArena>), DeviceError> {
    if decision.mode == Mode::Staging {
        return Ok((decision, None));
    }
    let route = match (decision.mode, wish) {
        // An engine's process may have other users of cuFile: they are told nothing that was not asked for.
        (Mode::Direct, Wish::Only(_)) => Route::Strict,
        (Mode::Direct, Wish::Auto) => Route::Straight,
        _ => Route::Any,
    };
    match DeviceArena::with_route(device, bytes, route) {
        Ok(arena) => Ok(match (device.digests(arena.memory().memory(), &[(0, PAGE)]), wish) {
            (Ok(_), _) => (decision, Some(arena)),
            (Err(error), Wish::Auto) => {
                let reason = cannot_digest(&error.to_string());
                (Decision { mode: Mode::Staging, reason, ..decision }, None)
            }
            (Err(error), Wish::Only(_)) => {
                let reason = unverified(&error.to_string());
                (Decision { reason, ..decision }, Some(arena))
            }
        }),
        Err(error) if wish == Wish::Auto => {
            let reason = format!("reads in the mode {} could not be prepared: {error}", decision.mode.name());
            Ok((Decision { mode: Mode::Staging, reason, ..decision }, None))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{Emulated, Faults, Model};
    use crate::pace::RealPace;

    fn found(bits: u32) -> Found {
        let device = if bits & 1 > 0 { Ok(()) } else { Err("no driver".to_owned()) };
        Found { device, library: bits & 2 > 0, module: bits & 4 > 0 }
    }

    #[test]
    fn every_machine_gets_a_way_that_verifies_and_is_told_what_it_offers() {
        for bits in 0..8 {
            let machine = found(bits);
            let decision = decide(&machine, Wish::Auto).unwrap();
            let mode = if bits == 7 { Mode::Direct } else { Mode::Staging };
            assert_eq!(decision.mode, mode, "{machine:?}");
            let offered = match bits {
                7 => Mode::Direct,
                3 => Mode::Compatibility,
                _ => Mode::Staging,
            };
            assert_eq!(decision.offered, offered, "{machine:?}");
            assert_eq!(decide(&machine, Wish::Only(Mode::Staging)).unwrap().mode, Mode::Staging);
        }
    }

    #[test]
    fn what_is_asked_for_by_name_is_used_or_an_error_that_says_what_is_missing() {
        let refused = |bits, mode| decide(&found(bits), Wish::Only(mode)).unwrap_err();
        assert!(refused(6, Mode::Direct).contains("no driver"));
        assert!(refused(5, Mode::Direct).contains("libcufile"));
        assert!(refused(7, Mode::Compatibility).contains("use the mode `direct`"));
        assert_eq!(decide(&found(7), Wish::Only(Mode::Direct)).unwrap().mode, Mode::Direct);
        assert_eq!(decide(&found(3), Wish::Only(Mode::Compatibility)).unwrap().mode, Mode::Compatibility);
        let without_module = decide(&found(3), Wish::Only(Mode::Direct)).unwrap();
        assert_eq!(without_module.mode, Mode::Direct);
        assert!(without_module.reason.contains("nvidia-fs"), "{without_module}");
        assert!("gds".parse::<Wish>().is_err() && "direct".parse() == Ok(Wish::Only(Mode::Direct)));
    }

    #[test]
    fn what_cannot_be_made_ready_is_staged_unless_it_was_asked_for_by_name() {
        let faults = Faults { no_files: true, ..Faults::default() };
        let mute: Arc<dyn Device> = Arc::new(Emulated::with(Model::default(), faults, RealPace::new()));
        let able: Arc<dyn Device> = Arc::new(Emulated::new(Model::default()));
        let ready = |device, wish| prepare(decide(&found(7), wish).unwrap(), wish, device, 1);
        let (decision, arena) = ready(&mute, Wish::Auto).unwrap();
        assert!(arena.is_none() && decision.mode == Mode::Staging && decision.offered == Mode::Direct);
        assert!(decision.reason.contains("set to refuse"), "{decision}");
        assert!(ready(&mute, Wish::Only(Mode::Direct)).is_err());
        assert!(ready(&mute, Wish::Only(Mode::Staging)).unwrap().1.is_none());
        let (decision, arena) = ready(&able, Wish::Auto).unwrap();
        assert!(arena.is_some() && decision.mode == Mode::Direct);
    }

    #[test]
    fn a_device_that_cannot_digest_is_found_out_before_it_is_relied_on() {
        let faults = Faults { no_digests: true, ..Faults::default() };
        let device: Arc<dyn Device> = Arc::new(Emulated::with(Model::default(), faults, RealPace::new()));
        let ready = |wish| prepare(decide(&found(7), wish).unwrap(), wish, &device, 1).unwrap();
        let (decision, arena) = ready(Wish::Auto);
        assert!(arena.is_none() && decision.mode == Mode::Staging && decision.offered == Mode::Direct);
        assert!(decision.reason.contains("kernels for digests"), "{decision}");
        let (decision, arena) = ready(Wish::Only(Mode::Direct));
        assert!(arena.is_some() && decision.mode == Mode::Direct);
        assert!(decision.reason.contains("read through host memory"), "{decision}");
    }

    #[test]
    fn looking_never_fails_whatever_is_missing() {
        let decision = decide(&look(Err("none".to_owned())), Wish::Auto).unwrap();
        assert!(decision.to_string().contains("staging"));
    }
}
