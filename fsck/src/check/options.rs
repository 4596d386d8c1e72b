//! How a check is made, and how much it looks at.

/// How much is looked at.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Level {
    /// Metadata.
    Quick,
    /// All digests.
    #[default]
    Full,
    /// Content ids, and what lies in different places compared.
    Deep,
}

impl Level {
    /// A stable name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Full => "full",
            Self::Deep => "deep",
        }
    }
}

/// How a check is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// How much is looked at.
    pub level: Level,
    /// Threads that read and verify.
    pub threads: usize,
    /// The store may be in use: what changes meanwhile does not count.
    pub live: bool,
    /// Fingerprints of a deep check that are kept in memory.
    pub memory_bytes: usize,
    /// Where more of them go, for the time of the check.
    pub spill: std::path::PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            level: Level::Full,
            threads: 2,
            live: false,
            memory_bytes: 256 << 20,
            spill: std::env::temp_dir(),
        }
    }
}
