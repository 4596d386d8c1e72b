//! A device by its name on the command line.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::cuda::Cuda;
use super::emulated::{Emulated, Model};
use super::{Device, Stream};
use crate::error::DeviceError;

/// `emulated` or `cuda:N`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceName {
    /// The emulated one.
    Emulated,
    /// A CUDA device by its number.
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match (name, name.strip_prefix("cuda:").map(str::parse)) {
            ("emulated", _) => Ok(Self::Emulated),
            (_, Some(Ok(ordinal))) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!("the device {name:?} does not exist: use emulated, or cuda:0, cuda:1, ...")),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emulated => f.write_str("emulated"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// An open device.
#[derive(Clone, Debug)]
pub enum Opened {
    /// The emulated one.
    Emulated(Emulated),
    /// A CUDA device.
    Cuda(Cuda),
}

impl DeviceName {
    /// Opens it.
    pub fn open(self) -> Result<Opened, DeviceError> {
        match self {
            Self::Emulated => Ok(Opened::Emulated(Emulated::new(Model::default()))),
            Self::Cuda(ordinal) => Cuda::open(ordinal).map(Opened::Cuda),
        }
    }
}

impl Opened {
    /// The device itself.
    pub fn device(&self) -> Arc<dyn Device> {
        match self {
            Self::Emulated(device) => Arc::new(device.clone()),
            Self::Cuda(device) => Arc::new(device.clone()),
        }
    }

    /// The number by which [`Device::adopt_stream`] knows a stream of the device's own.
    pub fn handle_of(&self, stream: &Stream) -> Result<u64, DeviceError> {
        match self {
            Self::Emulated(device) => device.handle_of(stream),
            Self::Cuda(device) => device.handle_of(stream),
        }
    }

    /// Stands for an engine's kernels of `time` on a stream. The emulated device sleeps in the stream, a real one keeps a
    /// thread of its own busy.
    pub fn compute(&self, stream: &Stream, time: Duration) -> Result<(), DeviceError> {
        match self {
            Self::Emulated(device) => device.compute(stream, time),
            Self::Cuda(device) => device.compute(stream, time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names_that_can_be_read_back() {
        for name in ["emulated", "cuda:0", "cuda:17"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        for wrong in ["cuda", "cuda:", "cuda:-1", "gpu", ""] {
            assert!(wrong.parse::<DeviceName>().is_err(), "{wrong}");
        }
    }
}
