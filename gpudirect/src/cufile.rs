//! GPUDirect Storage: whether this machine could read files straight into device memory, decided once at the start.
//!
//! Layers go through the arena today, whatever the machine could do: a layer is announced only when it is verified,
//! and direct reads, whose bytes would be digested on the device, are not built. What is decided here is
//! told to the operator and exported, so that nobody finds out at the first read that a module is missing.

use std::fmt;
use std::str::FromStr;

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
            _ => Err(format!("unknown mode {name:?}; there are auto, direct, compatibility and staging")),
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
        write!(f, "layers reach the device by {}: {}", self.mode.name(), self.reason)
    }
}

/// Looks at the machine without using anything that may be missing.
pub fn look(device: Result<(), String>) -> Found {
    let module = rustix::fs::access("/proc/driver/nvidia-fs/version", rustix::fs::Access::READ_OK).is_ok();
    Found { library: crate::device::cuda::has_cufile(), device, module }
}

/// Decides. A way that was asked for by name and cannot be used is an error that says what is missing.
pub fn decide(found: &Found, wish: Wish) -> Result<Decision, String> {
    let (offered, why) = match found {
        Found { device: Err(why), .. } => (Mode::Staging, why.clone()),
        Found { library: false, .. } => (Mode::Staging, "libcufile cannot be loaded".to_owned()),
        Found { module: false, .. } => (Mode::Compatibility, "the nvidia-fs module is not loaded".to_owned()),
        _ => (Mode::Direct, "nvidia-fs and libcufile are here".to_owned()),
    };
    match wish {
        Wish::Auto => {
            let reason = match offered {
                Mode::Staging => why,
                _ => format!("{why}, but only bytes that pass through the arena can be verified"),
            };
            Ok(Decision { mode: Mode::Staging, offered, reason })
        }
        Wish::Only(Mode::Staging) => {
            Ok(Decision { mode: Mode::Staging, offered, reason: "asked for".to_owned() })
        }
        Wish::Only(mode) => {
            let name = mode.name();
            let lacks = if offered == mode { "direct reads are not built".to_owned() } else { why };
            Err(format!("{name} reads cannot be used: {lacks}: use auto or staging"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(device: bool, library: bool, module: bool) -> Found {
        let device = if device { Ok(()) } else { Err("no driver".to_owned()) };
        Found { device, library, module }
    }

    #[test]
    fn every_machine_gets_a_way_that_verifies_and_is_told_what_it_offers() {
        for bits in 0..8 {
            let machine = found(bits & 1 > 0, bits & 2 > 0, bits & 4 > 0);
            let decision = decide(&machine, Wish::Auto).unwrap();
            assert_eq!(decision.mode, Mode::Staging);
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
    fn what_is_asked_for_by_name_and_missing_is_an_error_that_says_what() {
        let refused = |machine: &Found| decide(machine, Wish::Only(Mode::Direct)).unwrap_err();
        assert!(refused(&found(false, true, true)).contains("no driver"));
        assert!(refused(&found(true, false, true)).contains("libcufile"));
        assert!(refused(&found(true, true, false)).contains("nvidia-fs"));
        assert!(refused(&found(true, true, true)).contains("not built"));
        assert!("gds".parse::<Wish>().is_err() && "direct".parse() == Ok(Wish::Only(Mode::Direct)));
    }

    #[test]
    fn looking_never_fails_whatever_is_missing() {
        let decision = decide(&look(Err("none".to_owned())), Wish::Auto).unwrap();
        assert!(decision.to_string().contains("staging"));
    }
}
