//! Members by etcd: this node registers itself under a lease, and follows the members of each epoch.
//!
//! What is due is decided by [`kvarts_cluster::registry`]; here it is asked and written. etcd hears of members alone: its load
//! grows with nodes, and not with what they do. When it is away, everything stays as it is until it is back: the members
//! known last are used, and there is no new epoch. A node that stops leaves its lease to run out: one that is back before that was
//! never away.

mod access;
mod client;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvarts_cluster::members::{Member, Members};
use kvarts_cluster::registry::{KEYS_MAX, MEMBERS_KEY, View, node_key, registration, taken_key};
use tokio::sync::watch;
use tokio::task::JoinSet;

pub use access::EtcdAccess;
use client::Etcd;

/// The pause before etcd is asked again.
pub(crate) const PAUSE: Duration = Duration::from_millis(500);

/// Where a cluster registers its members.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EtcdOptions {
    /// Hosts and ports.
    pub endpoints: Vec<String>,
    /// What the cluster's keys begin with.
    pub prefix: String,
    /// How long a node that says nothing stays registered, in seconds.
    pub lease: u32,
}

/// What the tasks share.
#[derive(Debug)]
struct Shared {
    options: EtcdOptions,
    access: EtcdAccess,
    me: Member,
    /// Members that were written and have this node among them.
    members: watch::Sender<Option<Members>>,
    /// Those that the node has taken over.
    taken: watch::Sender<Option<Members>>,
    /// Why etcd cannot be reached, or why this node is not among the members yet.
    trouble: Mutex<String>,
}

/// This node's registration, kept for as long as this is not dropped.
#[derive(Debug)]
pub struct Registered {
    shared: Arc<Shared>,
    _task: JoinSet<()>,
}

impl Registered {
    /// Registers a node, again and again. On a tokio runtime.
    pub fn start(options: EtcdOptions, access: EtcdAccess, me: Member) -> Self {
        let (members, taken) = (watch::Sender::new(None), watch::Sender::new(None));
        let shared = Arc::new(Shared { options, access, me, members, taken, trouble: Mutex::default() });
        let mut task = JoinSet::new();
        task.spawn(keep(Arc::clone(&shared)));
        Self { shared, _task: task }
    }

    /// The first members that this node is one of. Says why there are none within this time.
    pub async fn first(&self, within: Duration) -> Result<Members, String> {
        let mut members = self.shared.members.subscribe();
        let first = members.wait_for(Option::is_some);
        match tokio::time::timeout(within, first).await {
            Ok(Ok(members)) => members.clone().ok_or_else(|| self.trouble()),
            _ => Err(self.trouble()),
        }
    }

    /// Why etcd cannot be reached, or why this node is not among the members; empty if neither.
    pub fn trouble(&self) -> String {
        self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The members that are registered, as they change.
    pub(crate) fn members(&self) -> watch::Receiver<Option<Members>> {
        self.shared.members.subscribe()
    }

    /// These members were taken over.
    pub(crate) fn took(&self, members: Members) {
        self.shared.taken.send_replace(Some(members));
    }
}

impl Shared {
    fn set_trouble(&self, trouble: String) {
        let mut last = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != trouble {
            match trouble.is_empty() {
                true => tracing::info!("etcd: this node is registered"),
                false => tracing::warn!(reason = %trouble, "etcd: the list of members stays unchanged"),
            }
            *last = trouble;
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.options.prefix)
    }

    fn known(&self) -> Option<Members> {
        self.taken.borrow().clone()
    }

    /// Takes in what was written.
    fn see(&self, view: &View) {
        let Some(members) = view.members() else { return };
        let is_member = members.get(self.me.id).is_some();
        self.members.send_if_modified(|last| {
            let new = view.to_take(self.me.id, last.as_ref().map(Members::epoch));
            new.map(|new| *last = Some(new.clone())).is_some()
        });
        self.set_trouble(match is_member {
            true => String::new(),
            false => format!(
                "this node is registered but not a member yet: a majority of the members of epoch {} must be \
                running",
                members.epoch()
            ),
        });
    }

    /// Does what is due: says which epoch this node is of, and proposes the next one.
    async fn act(&self, etcd: &Etcd, view: &mut View) -> Result<(), String> {
        let (me, known) = (self.me.id, self.known());
        if let Some(epoch) = view.to_say(me, known.as_ref()) {
            etcd.put(&self.key(&taken_key(me)), &epoch.to_string(), 0).await?;
            view.set(&taken_key(me), Some(epoch.to_string().as_bytes()), 0);
        }
        // Another one may have been first: then the change comes.
        if let Some(next) = view.due(me, known.as_ref())
            && let Some(revision) =
                etcd.swap(&self.key(MEMBERS_KEY), &next.to_text(), view.revision()).await?
        {
            view.set(MEMBERS_KEY, Some(next.to_text().as_bytes()), revision);
        }
        while let Some(left) = view.to_forget(me, known.as_ref()) {
            let (own, members) = (self.key(&node_key(left)), self.key(MEMBERS_KEY));
            let unchanged = [(members.as_str(), view.revision()), (own.as_str(), 0)];
            // Of one that registers itself again meanwhile it stays, and the changes come.
            if !etcd.remove(&self.key(&taken_key(left)), unchanged).await? {
                break;
            }
            view.set(&taken_key(left), None, 0);
        }
        self.see(view);
        Ok(())
    }
}

/// Registers the node, and begins again whenever etcd was away.
async fn keep(shared: Arc<Shared>) {
    let (mut lease, mut at) = (0, 0);
    loop {
        if let Err(trouble) = session(&shared, &mut lease, &mut at).await {
            shared.set_trouble(format!("etcd cannot be reached: {trouble}"));
        }
        at += 1;
        tokio::time::sleep(PAUSE).await;
    }
}

/// What is below the prefix, as far as it is this cluster's.
fn name<'a>(shared: &Shared, key: &'a [u8]) -> Option<&'a str> {
    std::str::from_utf8(key).ok()?.strip_prefix(shared.options.prefix.as_str())?.strip_prefix('/')
}

/// One connection to etcd, until something is wrong with it.
async fn session(shared: &Shared, lease: &mut i64, at: &mut usize) -> Result<(), String> {
    let (etcd, found) = Etcd::connect(&shared.options.endpoints, &shared.access, *at).await?;
    *at = found;
    let own = node_key(shared.me.id);
    // A lease that outlived the connection, or etcd's own restart, goes on.
    if *lease == 0 || !etcd.keep(*lease).await? {
        *lease = etcd.grant(i64::from(shared.options.lease)).await?;
    }
    etcd.put(&shared.key(&own), &registration(&shared.me), *lease).await?;
    let below = shared.key("");
    let (all, revision) = etcd.all(&below, KEYS_MAX).await?;
    let mut view = View::default();
    for pair in &all {
        if let Some(name) = name(shared, &pair.key) {
            view.set(name, Some(&pair.value), pair.mod_revision);
        }
    }
    let mut changes = etcd.watch(&below, revision.saturating_add(1)).await?;
    let mut taken = shared.taken.subscribe();
    let mut renew = tokio::time::interval(Duration::from_secs(u64::from(shared.options.lease)) / 3);
    loop {
        shared.act(&etcd, &mut view).await?;
        tokio::select! {
            _ = renew.tick() => {
                if !etcd.keep(*lease).await? {
                    *lease = 0;
                    return Err("the registration of this node has expired".to_owned());
                }
            }
            // ends: `renew` in the arm before it, or the sender goes with the node
            changed = taken.changed() => changed.map_err(|_| "this node is stopping")?,
            changed = changes.next() => {
                for (pair, is_there) in changed? {
                    if let Some(name) = name(shared, &pair.key) {
                        view.set(name, is_there.then_some(&pair.value), pair.mod_revision);
                    }
                }
                if !view.is_registered(shared.me.id) {
                    *lease = 0;
                    return Err("etcd no longer contains the registration of this node".to_owned());
                }
            }
        }
    }
}

/// What an address of etcd is, as `etcd://HOST:PORT[,HOST:PORT]/PREFIX`: the hosts and ports, and the prefix.
pub fn parse(text: &str) -> Option<(Vec<String>, String)> {
    let (hosts, prefix) = text.strip_prefix("etcd://")?.split_once('/')?;
    let is_good = |host: &&str| {
        let port = host.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        port.and_then(|(_, port)| port.parse::<u16>().ok()).is_some_and(|port| port > 0)
    };
    let all: Vec<&str> = hosts.split(',').map(str::trim).collect();
    let prefix = prefix.trim_end_matches('/');
    (all.iter().all(is_good) && !prefix.is_empty())
        .then(|| (all.into_iter().map(str::to_owned).collect(), prefix.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_etcd_has_hosts_with_ports_and_a_prefix() {
        let good = parse("etcd://a:2379,[::1]:2379/kvarts/one/").unwrap();
        assert_eq!(good, (vec!["a:2379".to_owned(), "[::1]:2379".to_owned()], "kvarts/one".to_owned()));
        for wrong in ["etcd://a:2379", "etcd://a:2379/", "etcd://a/p", "etcd:///p", "a:1/p", "etcd://a:0/p"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
