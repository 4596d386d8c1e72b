//! What limits the paths: token buckets of the kernel, in a network of this run's own, or what nodes let themselves serve.
//!
//! The kernel's are those of a real link: they save nothing while nothing is sent, what is on its way waits behind them, and
//! bytes that were sent in vain cost their time. They need root, `ip` and `tc`. Each node has an address of its own on the
//! loopback interface, by which the kernel tells whose bytes it lets through.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::{Command, Output};

use kvarts_peer::node::ClusterNode;
use kvarts_terminal::undo::Undo;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// What may go out at once after a pause: a few of the largest packets.
const BURST: &str = "256k";

/// Which of them is wanted.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Limiter {
    /// The kernel if it can limit the paths, otherwise the nodes
    Auto,
    /// The kernel; the benchmark fails if the kernel cannot limit the paths
    Kernel,
    /// The nodes, each of which limits the rate at which it serves
    Nodes,
}

/// What limits the paths of this run.
#[derive(Debug)]
pub(super) struct Limits {
    /// A network of this run's own; it is gone when this is dropped.
    network: Option<Undo>,
}

fn run(program: &str, arguments: &str) -> Result<(), String> {
    let told = |why: &dyn std::fmt::Display| format!("{program} {arguments}: {why}");
    let done = Command::new(program).args(arguments.split_whitespace()).output();
    let Output { status, stderr, .. } = done.map_err(|error| told(&error))?;
    match status.success() {
        true => Ok(()),
        false => Err(told(&String::from_utf8_lossy(&stderr).trim())),
    }
}

impl Limits {
    /// Those of the nodes.
    pub(super) fn of_nodes() -> Self {
        Self { network: None }
    }

    /// Those of the kernel: the calling thread is in the new network from now on, and so is what it starts.
    pub(super) fn of_kernel() -> Result<Self, String> {
        let name = format!("kvarts-bench-{}", std::process::id());
        let gone = name.clone();
        let made = Undo::of(
            || run("ip", &format!("netns add {name}")),
            // What stays behind has the number of this process in its name.
            move || drop(run("ip", &format!("netns del {gone}"))),
        );
        let (network, ()) = made?;
        let limits = Self { network: Some(network) };
        let path = format!("/run/netns/{name}");
        let told = |error: std::io::Error| format!("{path}: {error}");
        let file = File::open(&path).map_err(told)?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| told(error.into()))?;
        run("ip", "link set lo up")?;
        // Whether the kernel has what is needed.
        limits.limit(&[Some(1 << 30)])?;
        limits.limit(&[])?;
        Ok(limits)
    }

    /// Whether the kernel limits.
    pub(super) fn is_of_kernel(&self) -> bool {
        self.network.is_some()
    }

    /// The address of a node.
    pub(super) fn address(node: usize) -> String {
        format!("127.0.1.{}", node + 1)
    }

    /// What a node is told that it may serve a second.
    pub(super) fn served(&self, rate: Option<u64>) -> Option<u64> {
        rate.filter(|_| !self.is_of_kernel())
    }

    /// From now on nodes send others at most these bytes a second.
    pub(super) fn limit(&self, rates: &[Option<u64>]) -> Result<(), String> {
        if !self.is_of_kernel() {
            return Ok(());
        }
        // There may be none.
        let _ = run("tc", "qdisc del dev lo root");
        if rates.iter().all(Option::is_none) {
            return Ok(());
        }
        run("tc", "qdisc add dev lo root handle 1: htb")?;
        for (node, rate) in rates.iter().enumerate() {
            let Some(rate) = rate else { continue };
            let (class, from) = (node + 2, Self::address(node));
            run("tc", &class_of("add", class, *rate))?;
            let filter = "filter add dev lo parent 1: protocol ip prio 1 u32";
            run("tc", &format!("{filter} match ip src {from}/32 flowid 1:{class}"))?;
        }
        Ok(())
    }

    /// One of them sends at most `rate` bytes a second.
    pub(super) fn change(&self, number: usize, node: &ClusterNode, rate: u64) -> Result<(), String> {
        if !self.is_of_kernel() {
            node.limit_serving(Some(rate));
            return Ok(());
        }
        run("tc", &class_of("change", number + 2, rate))
    }
}

/// The arguments for a class; `bps` are bytes, and the quantum matters only between classes that lend to each other.
fn class_of(how: &str, class: usize, rate: u64) -> String {
    let burst = format!("burst {BURST} cburst {BURST} quantum 200000");
    format!("class {how} dev lo parent 1: classid 1:{class} htb rate {rate}bps {burst}")
}
