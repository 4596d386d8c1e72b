//! What a start can know before it takes or makes anything: a start and `kvarts config check` refuse the same configurations, in the same
//! words. What only a start finds out is whether ports are free, and what other nodes and the bucket answer.

use std::path::{Path, PathBuf};

use kvarts_gpudirect::cufile::Decision;
use kvarts_layout::format::names::SUPERBLOCK;
use kvarts_store::engine::{Options, SEGMENTS_MIN, refuse_beyond_disk};
use kvarts_store::home::{self, HomeOptions, Stop};
use rustix::fs::Gid;

use super::{cluster, devices, socket};
use crate::config::{Config, TlsFiles};
use crate::grpc::{Identity, Tls};
use crate::human;
use crate::sizes;

/// A configuration with which a start goes on.
pub(super) struct Checked {
    pub(super) tls: Option<Tls>,
    pub(super) files: Decision,
    /// The group of the local socket.
    pub(super) group: Option<Gid>,
    pub(super) options: HomeOptions,
    pub(super) notes: Vec<String>,
}

impl Checked {
    /// Says in one line what is wrong, and where.
    pub(super) fn of(config: &Config, stop: &Stop) -> Result<Self, String> {
        let tls = config.tls.as_ref().map(read_tls).transpose()?;
        let files = devices::decide(config.cufile)?;
        let group = config.socket_group.as_deref().map(socket::group).transpose()?;
        if let Some(path) = config.socket.as_deref().filter(|path| !is_inside(path, config)) {
            socket::refuse_unusable(path)?;
        }
        if let Some(cluster) = &config.cluster {
            cluster::check(cluster, &config.gate)?;
            let named = |me| cluster::Named::of(cluster, me).map(drop);
            home::store_id(&config.directories, stop).map_or(Ok(()), named)?;
        }
        let is_made = home::segment_bytes(&config.directories, stop).is_some();
        home::refuse_unusable(&config.directories, is_made, stop)
            .map_err(|why| format!("store.directories: {why}"))?;
        let mut notes = vec![files.to_string(), memory_note(config)];
        let options = home_options(config, stop, &mut notes)?;
        // Of one that cannot be read opening says what is wrong with it.
        if !config.directories.iter().any(|directory| directory.join(SUPERBLOCK).exists()) {
            let (budget, least) =
                (options.store.budget_bytes, options.store.segment_bytes.saturating_mul(SEGMENTS_MIN));
            let free = home::free_bytes(&config.directories)
                .map_err(|error| format!("store.directories: {error}"))?;
            refuse_beyond_disk(budget, free, 0, least)
                .map_err(|refused| format!("store.budget: {refused}"))?;
        }
        Ok(Self { tls, files, group, options, notes })
    }
}

/// Refuses what a start refuses before it takes or makes anything.
pub fn check(config: &Config) -> Result<(), String> {
    Checked::of(config, &Stop::default()).map(drop)
}

/// Whether a path is in a directory of the store.
pub(super) fn is_inside(path: &Path, config: &Config) -> bool {
    config.directories.iter().any(|directory| path.starts_with(directory))
}

fn home_options(config: &Config, stop: &Stop, notes: &mut Vec<String>) -> Result<HomeOptions, String> {
    let own = kvarts_store::home::segment_bytes(&config.directories, stop);
    if let Some((own, asked)) = own.zip(config.segment_bytes)
        && own != asked
    {
        let (own, asked) = (human::bytes(own), human::bytes(asked));
        notes.push(format!(
            "store.segment: the value {asked} has no effect: this store has segments of {own}, which cannot \
            be changed"
        ));
    }
    let segment_bytes =
        own.or(config.segment_bytes).unwrap_or_else(|| kvarts_store::home::fitting_segment(config.budget));
    notes.push(format!("segments of {}", human::bytes(segment_bytes)));
    let budget = match config.budget {
        Some(budget) => budget,
        None => fitting_budget(config, segment_bytes, own.is_some(), notes)?,
    };
    let least = segment_bytes.saturating_mul(SEGMENTS_MIN);
    if budget < least {
        let (budget, least) = (human::bytes(budget), human::bytes(least));
        return Err(format!(
            "store.budget: {budget} is too small: the store needs four segments, so use --budget \
            \"{least}\" or more"
        ));
    }
    let shards =
        config.shards.unwrap_or_else(|| sizes::shards(budget, config.directories.len(), segment_bytes));
    let index_bytes_max = config.index.or_else(sizes::index_bytes);
    if let Some(bytes) = index_bytes_max {
        notes.push(format!("the index of blocks may use up to {} of memory", human::bytes(bytes)));
    }
    Ok(HomeOptions {
        directories: config.directories.clone(),
        io: config.io,
        features: config.io_disable.clone(),
        runtime: config.runtime,
        replace: Vec::new(),
        cores: Vec::new(),
        stop: stop.clone(),
        store: Options {
            segment_bytes,
            shards_per_directory: shards,
            budget_bytes: budget,
            index_bytes_max,
            eviction: config.policy,
            endurance_bytes_per_day: config.endurance,
            executors: config.executors,
            ..Options::default()
        },
    })
}

/// How much memory this configuration allows in all.
fn memory_note(config: &Config) -> String {
    let all = config.memory_parts().iter().map(|part| part.bytes).fold(0, u64::saturating_add);
    format!(
        "memory: at most {}, apart from the memory that local clients share; `kvarts config show` lists its \
        parts",
        human::bytes(all)
    )
}

/// A budget that fits: most of what is free, and what the store has already.
fn fitting_budget(
    config: &Config,
    segment_bytes: u64,
    is_made: bool,
    notes: &mut Vec<String>,
) -> Result<u64, String> {
    let total = sizes::budget(&config.directories, config.budget_part)?;
    let least = segment_bytes.saturating_mul(SEGMENTS_MIN);
    if total < least {
        let (free, shown) = (human::bytes(total), human::bytes(least));
        if !is_made {
            return Err(format!(
                "the disk has {free} free, but the store needs {shown}: delete other files, or create the \
                store with a smaller --segment"
            ));
        }
        // What a store has is served, however full the disk is.
        notes.push(format!("budget: {shown} (the minimum of a store; the disk has {free} free)"));
        return Ok(least);
    }
    let of = match config.budget_part {
        Some(part) => format!("{part}% of the disk"),
        None => format!("{}% of the free disk, plus the size of the store", sizes::FREE_SHARE),
    };
    notes.push(format!("budget: {} ({of})", human::bytes(total)));
    Ok(total)
}

/// Who the server is, read and checked. Says in one line what is wrong.
pub(super) fn read_tls(files: &TlsFiles) -> Result<Tls, String> {
    let read = |path: &PathBuf| std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    Tls::new(&Identity {
        certificate: read(&files.certificate)?,
        key: read(&files.key)?,
        client_authority: files.client_authority.as_ref().map(read).transpose()?,
    })
}
