//! Makes a ring with the best flags that the kernel takes, and says why it cannot where it is forbidden.

use io_uring::opcode::WritevFixed;
use io_uring::{Builder, IoUring, Probe, cqueue, squeue};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity};

use super::features::{Feature, Features, Outcomes};
use super::ring_buffers::{Registered, view};

/// Submissions between two hand-overs to the kernel.
const SQ_ENTRIES: u32 = 256;
/// Completions that wait to be reaped; as many operations are in the kernel at once, so that none overflows.
const CQ_ENTRIES: u32 = 4096;

/// A ring and what was found out while making it.
pub(super) struct Setup {
    pub(super) ring: IoUring,
    pub(super) registered: Option<Registered>,
    pub(super) outcomes: Outcomes,
}

/// Makes a ring for the calling thread. An error says what forbids it, what that costs and how to allow it.
pub(super) fn make(features: &Features) -> Result<Setup, String> {
    let mut outcomes = Outcomes::new(features);
    let ring = build(features, &mut outcomes).map_err(|error| forbidden(&error))?;
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(
            "the io_uring of this kernel is too old (Linux 5.15 or newer is needed); threads are used \
            instead, which need more CPU time for each read"
                .to_owned(),
        );
    }
    let registered = if features.allows(Feature::FixedBuffers) {
        let made = Registered::new(&ring.submitter());
        outcomes.note(Feature::FixedBuffers, made.as_ref().map(drop).map_err(unsupported));
        made.ok()
    } else {
        None
    };
    if features.allows(Feature::VectoredFixed) {
        outcomes.note(Feature::VectoredFixed, probe_vectored(&ring, registered.is_some()));
    }
    if features.allows(Feature::DurableWrite) {
        outcomes.note(Feature::DurableWrite, Ok(()));
    }
    if features.allows(Feature::WorkerAffinity) {
        outcomes.note(Feature::WorkerAffinity, keep_workers_off(&ring));
    }
    Ok(Setup { ring, registered, outcomes })
}

/// Tries combinations of flags, best first. The flags a kernel does not know are refused all at once.
fn build(features: &Features, outcomes: &mut Outcomes) -> std::io::Result<IoUring> {
    use Feature::{CoopTaskrun, DeferTaskrun, SingleIssuer, TaskrunFlag};
    let wanted: [&[Feature]; 5] = [
        &[SingleIssuer, DeferTaskrun, TaskrunFlag],
        &[SingleIssuer, CoopTaskrun, TaskrunFlag],
        &[CoopTaskrun, TaskrunFlag],
        &[SingleIssuer],
        &[],
    ];
    let mut refusal = None;
    for wanted in wanted {
        let mut flags: Vec<Feature> = wanted.iter().copied().filter(|flag| features.allows(*flag)).collect();
        // The kernel defers only for a single issuer, and sets the flag only if it does not interrupt.
        if !flags.contains(&SingleIssuer) {
            flags.retain(|flag| *flag != DeferTaskrun);
        }
        if !flags.contains(&DeferTaskrun) && !flags.contains(&CoopTaskrun) {
            if wanted.contains(&DeferTaskrun) {
                // The next combination has a better substitute.
                continue;
            }
            flags.retain(|flag| *flag != TaskrunFlag);
        }
        match try_build(&flags) {
            Ok(ring) => {
                note_flags(&flags, refusal.as_ref(), outcomes);
                return Ok(ring);
            }
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => refusal = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(refusal.unwrap_or_else(|| Errno::INVAL.into()))
}

fn note_flags(used: &[Feature], refusal: Option<&std::io::Error>, outcomes: &mut Outcomes) {
    use Feature::{CoopTaskrun, DeferTaskrun, SingleIssuer, TaskrunFlag};
    for flag in [SingleIssuer, DeferTaskrun, CoopTaskrun, TaskrunFlag] {
        let outcome = if used.contains(&flag) {
            Ok(())
        } else if flag == CoopTaskrun && used.contains(&DeferTaskrun) {
            Err("not needed together with defer-taskrun".to_owned())
        } else {
            Err(refusal.map_or_else(
                || "not possible, because a feature that this feature requires is off".to_owned(),
                unsupported,
            ))
        };
        outcomes.note(flag, outcome);
    }
}

fn try_build(flags: &[Feature]) -> std::io::Result<IoUring> {
    let mut builder: Builder<squeue::Entry, cqueue::Entry> = IoUring::builder();
    builder.setup_clamp().setup_cqsize(CQ_ENTRIES).dontfork();
    for flag in flags {
        match flag {
            Feature::SingleIssuer => builder.setup_single_issuer(),
            Feature::DeferTaskrun => builder.setup_defer_taskrun(),
            Feature::CoopTaskrun => builder.setup_coop_taskrun(),
            Feature::TaskrunFlag => builder.setup_taskrun_flag(),
            _ => &mut builder,
        };
    }
    builder.build(SQ_ENTRIES)
}

fn probe_vectored(ring: &IoUring, registered: bool) -> Result<(), String> {
    if !registered {
        return Err("not possible, because the feature fixed-buffers is off".to_owned());
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| unsupported(&error))?;
    if probe.is_supported(WritevFixed::CODE) {
        Ok(())
    } else {
        Err("the kernel does not support this feature".to_owned())
    }
}

/// Where this thread is pinned to one core, keeps the kernel's helper threads off it: they would inherit the pin,
/// and what they copy would then be copied on the executor's own time.
fn keep_workers_off(ring: &IoUring) -> Result<(), String> {
    let own = sched_getaffinity(None).map_err(|error| unsupported(&error.into()))?;
    if own.count() != 1 {
        return Err("not needed: the thread is not pinned to one core".to_owned());
    }
    // The first thread of the process has what the process as a whole may use, unless it is pinned itself.
    let mut others = sched_getaffinity(Some(rustix::process::getpid())).unwrap_or(own);
    let own = (0..CpuSet::MAX_CPU).filter(|cpu| own.is_set(*cpu));
    own.for_each(|cpu| others.unset(cpu));
    if others.count() == 0 {
        return Err("the process is limited to one core".to_owned());
    }
    // SAFETY: `CpuSet` is a plain set of bits, laid out as the kernel's and the C library's `cpu_set_t`.
    let set = unsafe { view(&others) };
    ring.submitter().register_iowq_aff(set).map_err(|error| unsupported(&error))
}

fn unsupported(error: &std::io::Error) -> String {
    format!("the kernel refused this feature: {error}")
}

/// One line: what forbids the ring, what that costs, how to allow it.
fn forbidden(error: &std::io::Error) -> String {
    let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    explain(error, switch.trim())
}

fn explain(error: &std::io::Error, switch: &str) -> String {
    let why = match (Errno::from_io_error(error), switch) {
        (Some(Errno::PERM), "2") => {
            "the system setting kernel.io_uring_disabled forbids io_uring (sysctl \
            kernel.io_uring_disabled=0 allows it)"
        }
        (Some(Errno::PERM), "1") => {
            "the system setting kernel.io_uring_disabled forbids io_uring to ordinary users (sysctl \
            kernel.io_uring_disabled=0 allows it)"
        }
        (Some(Errno::PERM | Errno::ACCESS), _) => {
            "a seccomp profile forbids io_uring, as the profiles of container runtimes do (allow \
            io_uring_setup, io_uring_enter and io_uring_register in the container's profile)"
        }
        (Some(Errno::NOSYS), _) => {
            "this kernel lacks io_uring, or a seccomp profile hides io_uring (Linux 5.15 or newer is \
            needed)"
        }
        (Some(Errno::NOMEM), _) => {
            "the memory for io_uring could not be locked (raise the limit on locked memory: ulimit -l)"
        }
        _ => "the kernel refused io_uring",
    };
    format!(
        "io_uring cannot be used: {why} [{error}]; threads are used instead, which need more CPU time for \
        each read"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_of_forbidding_the_ring_is_told_with_its_own_remedy() {
        let told = |errno: Errno, switch| explain(&errno.into(), switch);
        assert!(told(Errno::PERM, "2").contains("forbids io_uring (sysctl"));
        assert!(told(Errno::PERM, "1").contains("ordinary users"));
        assert!(told(Errno::PERM, "0").contains("seccomp"));
        assert!(told(Errno::NOSYS, "").contains("5.15"));
        assert!(told(Errno::NOMEM, "0").contains("ulimit -l"));
        for errno in [Errno::PERM, Errno::NOSYS, Errno::NOMEM, Errno::INVAL] {
            assert!(
                told(errno, "0").contains("threads are used instead") && !told(errno, "0").contains('\n')
            );
        }
    }
}
