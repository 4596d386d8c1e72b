//! What goes wrong on a simulated disk, and when: rules, all of them off until injected.
//!
//! A rule counts the operations it applies to when they are submitted, so "the third write" is the same write
//! whatever the latencies are.

use std::time::Duration;

use kvarts_contract::io_error::DirId;
use kvarts_store::io::{MetaOp, Op};

/// The kinds of operations.
#[allow(missing_docs, reason = "named as the operations are")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    Read,
    Write,
    Flush,
    Open,
    Close,
    Allocate,
    Punch,
    Holes,
    Truncate,
    Rename,
    Remove,
    MakeDir,
    SyncDir,
    List,
    Stat,
    Space,
    Compute,
}

impl OpKind {
    /// All kinds.
    pub const ALL: [Self; 17] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Open,
        Self::Close,
        Self::Allocate,
        Self::Punch,
        Self::Holes,
        Self::Truncate,
        Self::Rename,
        Self::Remove,
        Self::MakeDir,
        Self::SyncDir,
        Self::List,
        Self::Stat,
        Self::Space,
        Self::Compute,
    ];

    /// The kind of an operation.
    pub fn of(op: &Op) -> Self {
        match op {
            Op::Read { .. } => Self::Read,
            Op::Write { .. } | Op::WriteV { .. } => Self::Write,
            Op::Flush { .. } => Self::Flush,
            Op::Meta(op) => match op {
                MetaOp::Open { .. } | MetaOp::Reopen { .. } => Self::Open,
                MetaOp::Close { .. } => Self::Close,
                MetaOp::Allocate { .. } => Self::Allocate,
                MetaOp::PunchHole { .. } => Self::Punch,
                MetaOp::Truncate { .. } => Self::Truncate,
                MetaOp::Rename { .. } => Self::Rename,
                MetaOp::Remove { .. } => Self::Remove,
                MetaOp::MakeDir { .. } => Self::MakeDir,
                MetaOp::SyncDir { .. } => Self::SyncDir,
                MetaOp::List { .. } => Self::List,
                MetaOp::Stat { .. } => Self::Stat,
                MetaOp::Holes { .. } => Self::Holes,
                MetaOp::Space { .. } => Self::Space,
                MetaOp::Compute { .. } => Self::Compute,
            },
        }
    }

    /// As the event log has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Open => "open",
            Self::Close => "close",
            Self::Allocate => "allocate",
            Self::Punch => "punch",
            Self::Holes => "holes",
            Self::Truncate => "truncate",
            Self::Rename => "rename",
            Self::Remove => "remove",
            Self::MakeDir => "make-dir",
            Self::SyncDir => "sync-dir",
            Self::List => "list",
            Self::Stat => "stat",
            Self::Space => "space",
            Self::Compute => "compute",
        }
    }
}

/// Which operations a rule applies to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    /// Every one.
    Any,
    /// Those of one kind.
    Kind(OpKind),
    /// Whatever is not a read, write or flush.
    Meta,
    /// Whatever changes the disk or makes a change durable.
    Mutating,
    /// Those that need space which the file does not have yet.
    Allocating,
}

/// When a rule strikes, counting from one what it applies to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Once.
    Nth(u64),
    /// From then on, always.
    From(u64),
    /// This often in a million.
    Odds(u32),
}

/// What happens to an operation that a rule strikes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Nothing is done and this errno comes back (a positive number here, negative in the completion).
    Errno(i32),
    /// This errno comes back, and of a write any sectors may have been written.
    Torn(i32),
    /// Fewer bytes are moved than asked for, at least one sector if there is more than one (reads and writes).
    Short,
    /// No byte is moved and the completion says zero (reads and writes).
    Zero,
    /// A flush fails with `EIO`, its changes are forgotten, and the next flush succeeds.
    DropDirty,
    /// No completion ever comes, and the memory stays with the device.
    Stuck,
    /// A write, flush or change of names is acknowledged and not done.
    Lost,
    /// A write is acknowledged and lands somewhere else.
    Misdirect,
    /// One bit is other than it was: in what a read returns, or in what a write stores.
    FlipBit,
    /// It takes this much longer.
    Delay(Duration),
    /// The completion comes twice.
    Twice,
}

impl Effect {
    /// As the event log has it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Errno(_) => "refused",
            Self::Torn(_) => "torn",
            Self::Short => "short",
            Self::Zero => "nothing",
            Self::DropDirty => "dirty-dropped",
            Self::Stuck => "stuck",
            Self::Lost => "lost",
            Self::Misdirect => "misdirected",
            Self::FlipBit => "bit-flipped",
            Self::Delay(_) => "delayed",
            Self::Twice => "twice",
        }
    }
}

/// One fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Which operations.
    pub which: Which,
    /// Of one directory (device) only.
    pub dir: Option<DirId>,
    /// Of files only whose names, as they were opened, end so.
    pub name: Option<&'static str>,
    /// When.
    pub when: When,
    /// What happens.
    pub effect: Effect,
}

impl Rule {
    /// A fault on any device.
    pub const fn new(which: Which, when: When, effect: Effect) -> Self {
        Self { which, dir: None, name: None, when, effect }
    }

    /// The same fault on one device only.
    #[must_use]
    pub const fn on(mut self, dir: DirId) -> Self {
        self.dir = Some(dir);
        self
    }

    /// The same fault only on files whose names, as they were opened, end so.
    #[must_use]
    pub const fn named(mut self, end: &'static str) -> Self {
        self.name = Some(end);
        self
    }

    pub(super) fn applies(&self, kind: OpKind, (dir, name): (Option<DirId>, &str), allocating: bool) -> bool {
        let which = match self.which {
            Which::Any => true,
            Which::Kind(wanted) => kind == wanted,
            Which::Meta => !matches!(kind, OpKind::Read | OpKind::Write | OpKind::Flush),
            Which::Mutating => !matches!(
                kind,
                OpKind::Read | OpKind::Close | OpKind::List | OpKind::Stat | OpKind::Space | OpKind::Compute
            ),
            Which::Allocating => allocating,
        };
        let named = self.name.is_none_or(|end| name.ends_with(end));
        which && named && (self.dir.is_none() || self.dir == dir)
    }
}
