//! Tenants that come and go while a server runs: who comes sees nothing of who left, what is refused changes nothing, and what
//! no tenant owns is told, given away or deleted.
#![allow(clippy::disallowed_methods, reason = "members of a real server's cluster stand in a file")]

use std::collections::BTreeSet;
use std::time::Duration;

use crate::serve_tenants::{COLUMN, find, put, read, register};
use crate::served::Served;
use kvarts_client::{Client, Pinned};
use kvarts_contract::api::{BlockOutcome, DeleteRequest, KvStore, Target, TtlRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_server::state::auth::TokenHash;
use kvarts_tests::depth::seeds;
use kvarts_tests::fixture;
use kvarts_tests::sim::rng::Seed;
use kvarts_tests::stage::Scratch;
use kvarts_wire::proto;

const HOLD: Duration = Duration::from_secs(60);

/// Tenants with these names, each with every right and a token that is its name, and what else stands there of each.
fn tenants_with(names: &[&str], more: &str) -> String {
    let one = |name: &&str| {
        let hash = TokenHash::of(&format!("kvarts_{name}"));
        let rights = "'read', 'write', 'pin', 'delete', 'admin'";
        format!(
            "[[tenants]]\nname = '{name}'\n{more}[[tokens]]\ntenant = '{name}'\nrights = [{rights}]\nhash = '{hash}'\n"
        )
    };
    names.iter().map(one).collect()
}

fn tenants(names: &[&str]) -> String {
    tenants_with(names, "")
}

fn of(served: &Served, tenant: &str) -> Client {
    served.client(Some(&format!("kvarts_{tenant}")))
}

fn delete(client: &Client, namespace: NamespaceId) -> Result<u64, Error> {
    let request = DeleteRequest { namespace, target: Target::Namespace, deadline: None };
    block_on(client.delete(request)).unwrap().map(|reply| reply.blocks)
}

/// Why nothing is read, if nothing is.
fn unread(client: &Client, namespace: NamespaceId, keys: &[BlockKey]) -> Option<Error> {
    match read(client, namespace, keys) {
        Ok((end, _)) if end.usable_blocks > 0 => None,
        Ok((end, _)) => end.failures.into_iter().next().map(|(_, reason)| Error(reason)),
        Err(error) => Some(error),
    }
}

/// Nothing that can be asked about the namespace tells more than that there is none of that name.
fn expect_unknown(client: &Client, namespace: NamespaceId, keys: &[BlockKey]) {
    let (group, coordinate) = COLUMN;
    let ttl = TtlRequest { namespace, group, coordinate, keys, ttl: None };
    let answers: [(&str, Option<Error>); 6] = [
        ("match", find(client, namespace, keys, None).err()),
        ("read", unread(client, namespace, keys)),
        ("put", put(client, namespace, keys, 9).err()),
        ("set_ttl", client.set_ttl(&ttl).err()),
        ("delete", delete(client, namespace).err()),
        ("pin", client.pin(namespace, COLUMN, keys, HOLD).err()),
    ];
    for (what, error) in answers {
        assert_eq!(error.map(|error| error.0), Some(Reason::UnknownNamespace(namespace)), "{what}");
    }
}

#[test]
fn a_tenant_that_comes_after_another_left_sees_nothing_of_it() {
    let served = Served::start("leave-numbers", &tenants(&["a", "b", "c"]));
    let (a, c) = (of(&served, "a"), of(&served, "c"));
    let (of_a, of_c) = (register(&a), register(&c));
    let keys = fixture::keys(5, 0..4);
    for (client, namespace) in [(&a, of_a), (&c, of_c)] {
        assert_eq!(put(client, namespace, &keys, 1).unwrap(), vec![BlockOutcome::Stored; 4]);
    }
    let lease = find(&c, of_c, &keys, Some(HOLD)).unwrap().lease.unwrap();
    let Pinned { lease: pin, .. } = c.pin(of_c, COLUMN, &keys, HOLD).unwrap();
    let mut events = c.watch(kvarts_wire::proto::WatchRequest::default()).unwrap();
    let local = served.local(Some("kvarts_c"));
    assert_eq!(register(&local), of_c);
    let number = |name: &str| {
        let tenants = served.daemon().state().gate.tenants();
        tenants.iter().find(|tenant| tenant.name == name).unwrap().number
    };
    let its = number("c");
    assert!(served.metrics().contains("tenant=\"c\""));
    // One after the other: what counts by the tenants there are now would give the second one what the first had.
    served.reload(&tenants(&["a", "b"])).unwrap();
    let ended = served.runtime.block_on(async { tokio::time::timeout(HOLD, events.message()).await });
    assert!(matches!(ended, Ok(Ok(None))), "{ended:?}");
    served.until("its local sessions end", |daemon| daemon.state().locals.clients().is_empty());
    let state = served.daemon().state();
    assert!(state.leases.list(&[its], kvarts_contract::clock::Nanos(0), 10).0.is_empty());
    assert_eq!(state.models.used(its).count, 0);
    assert!(!served.metrics().contains("tenant=\"c\""), "a name that is told of no more");
    served.reload(&tenants(&["a", "b", "d"])).unwrap();
    assert_ne!(number("d"), its);
    let d = of(&served, "d");
    assert!(d.models().unwrap().models.is_empty());
    expect_unknown(&d, of_c, &keys);
    assert!(d.pins(false).unwrap().pins.is_empty());
    assert!(!d.unlock(lease) && !d.unlock(pin.unwrap()));
    assert!(d.renew(lease, HOLD).is_err());
    let of_d = register(&d);
    assert_eq!(find(&d, of_d, &keys, None).unwrap().usable.longest.blocks, 0);
    // Who was there all the time has what it had; who comes back has what it stored.
    assert_eq!(read(&a, of_a, &keys).unwrap().0.usable_blocks, 4);
    served.reload(&tenants(&["c", "d", "a"])).unwrap();
    let c = of(&served, "c");
    assert!(c.models().unwrap().models.iter().all(|model| !model.registered) && number("c") != its);
    assert!(!c.unlock(lease), "its leases ended when it left");
    assert_eq!(register(&c), of_c);
    assert_eq!(read(&c, of_c, &keys).unwrap().0.usable_blocks, 4);
    assert!(served.metrics().contains("tenant=\"c\""), "it is told of again");
}

/// Tenants of the seeded run, of which some are here at a time.
const NAMES: [&str; 5] = ["v", "w", "x", "y", "z"];

/// What one of them has.
#[derive(Default)]
struct Known {
    namespace: Option<NamespaceId>,
    /// Whether it has registered since it was let in.
    registered: bool,
    stored: BTreeSet<u64>,
}

struct Crowd {
    served: Served,
    clients: Vec<Client>,
    here: Vec<usize>,
    known: Vec<Known>,
}

impl Crowd {
    fn come(here: Vec<usize>) -> Self {
        let served = Served::start("leave-seeded", &tenants(&named_of(&here)));
        let clients = NAMES.iter().map(|name| of(&served, name)).collect();
        let known = NAMES.iter().map(|_| Known::default()).collect();
        Self { served, clients, here, known }
    }

    fn change(&mut self, here: Vec<usize>) {
        for at in self.here.iter().filter(|at| !here.contains(at)) {
            self.known[*at].registered = false;
        }
        self.here = here;
        self.served.reload(&tenants(&named_of(&self.here))).unwrap();
    }

    /// Another one's name is none, also while that one is here.
    fn expect_foreign(&self, who: usize, other: usize, keys: &[BlockKey], said: &str) {
        let Some(foreign) = self.known[other].namespace.filter(|_| other != who) else { return };
        let (client, unknown) = (&self.clients[who], Some(Reason::UnknownNamespace(foreign)));
        assert_eq!(find(client, foreign, keys, None).err().map(|error| error.0), unknown, "{said}");
        assert_eq!(unread(client, foreign, keys).map(|error| error.0), unknown, "{said}");
        assert_eq!(delete(client, foreign).err().map(|error| error.0), unknown, "{said}");
    }

    fn act(&mut self, who: usize, key: u64, what: usize, said: &str) {
        let (client, own) = (&self.clients[who], &mut self.known[who]);
        let listed = client.models().unwrap().models;
        let registered = listed.iter().filter(|model| model.registered).count();
        assert_eq!(registered, usize::from(own.registered), "{said}");
        let (namespace, keys) = (register(client), fixture::keys(5, key..key + 1));
        assert!(own.namespace.is_none_or(|before| before == namespace), "{said}");
        (own.namespace, own.registered) = (Some(namespace), true);
        match what {
            0 => {
                let stored = put(client, namespace, &keys, who as u64).unwrap();
                let is_there = matches!(stored[..], [BlockOutcome::Stored | BlockOutcome::AlreadyThere]);
                assert!(is_there, "{said}: {stored:?}");
                own.stored.insert(key);
            }
            1 => {
                assert_eq!(delete(client, namespace).unwrap(), own.stored.len() as u64, "{said}");
                own.stored.clear();
            }
            2 => drop(find(client, namespace, &keys, Some(HOLD)).unwrap()),
            _ => {
                let pins = client.pins(false).unwrap().pins;
                let is_own = |pin: &proto::list_pins_reply::Pin| pin.namespace == namespace.as_bytes()[..];
                assert!(pins.iter().all(is_own), "{said}: {pins:?}");
            }
        }
        let (end, blocks) = read(client, namespace, &keys).unwrap();
        assert_eq!(end.usable_blocks, u32::from(own.stored.contains(&key)), "{said}");
        if own.stored.contains(&key) {
            let shape = fixture::shape(COLUMN.0, COLUMN.1);
            let content = fixture::content(&keys[0], COLUMN.0, COLUMN.1, who as u64, &shape);
            assert_eq!(blocks[0], content, "{said}: another tenant's bytes");
        }
    }
}

fn named_of(here: &[usize]) -> Vec<&'static str> {
    here.iter().map(|at| NAMES[*at]).collect()
}

#[test]
fn whatever_tenants_do_while_others_come_and_go_each_finds_its_own_alone() {
    for seed in 0..seeds(2, 20) {
        let mut rng = Seed(seed).child("tenants").rng();
        let mut draw = |most: usize| (rng.next_u64() % most as u64) as usize;
        let mut crowd = Crowd::come(vec![0, 1, 2]);
        for step in 0..120 {
            let (who, other, key) = (draw(NAMES.len()), draw(NAMES.len()), draw(6) as u64);
            let said = format!("seed {seed}, step {step}, {}", NAMES[who]);
            if draw(8) == 0 {
                // Others, in another order, and never none.
                let mut left: Vec<usize> = (0..NAMES.len()).filter(|_| draw(2) == 0).collect();
                left.push(who);
                left.sort_unstable_by_key(|at| (at + step) % NAMES.len());
                left.dedup();
                crowd.change(left);
            } else if crowd.here.contains(&who) {
                crowd.expect_foreign(who, other, &fixture::keys(5, key..key + 1), &said);
                crowd.act(who, key, draw(4), &said);
            } else {
                let error = crowd.clients[who].models().unwrap_err();
                assert!(matches!(error.0, Reason::Denied(_)), "{said}: {error}");
            }
        }
    }
}

#[test]
fn a_reload_that_is_refused_changes_nothing_and_an_older_epoch_is_told() {
    let mut served = Served::start("leave-refused", "");
    let id = served.daemon().state().engine.stats().store;
    let [.., high, low] = std::process::id().to_be_bytes();
    let scratch = Scratch::new("leave-refused-members");
    std::fs::create_dir_all(scratch.path()).unwrap();
    let path = scratch.path().join("members.toml");
    let members = |epoch: u64, id: &str| {
        let node = format!("[[node]]\nid = \"{id}\"\naddress = \"127.240.{high}.{low}:7400\"\n");
        std::fs::write(&path, format!("epoch = {epoch}\n{node}")).unwrap();
    };
    let file = |names: &[&str], more: &str| {
        let secret = path.with_file_name("secret");
        std::fs::write(&secret, [7; 32]).unwrap();
        let cluster = format!("[cluster]\nmembers = '{}'\nsecret = '{}'\n", path.display(), secret.display());
        cluster + &tenants_with(names, more)
    };
    members(5, &id.to_string());
    served.restart_with(&file(&["a", "b"], "disk = '8 MiB'\n"));
    let lets_in = |name: &str| of(&served, name).models().is_ok();
    let refused = |why: &str, wanted: &str| {
        let error = served.reload(&file(&["a", "c"], "disk = '1 MiB'\n")).unwrap_err();
        assert!(error.contains(wanted), "{why}: {error}");
        assert!(lets_in("a") && lets_in("b") && !lets_in("c"), "{why}: tokens have changed");
        let node = served.daemon().state().decided.cluster.clone().unwrap();
        assert_eq!(node.members().epoch(), 5, "{why}");
    };
    std::fs::write(&path, "epoch = none").unwrap();
    refused("no TOML", "members.toml");
    members(6, "00112233445566778899aabbccddeeff");
    refused("without this node", "not in the list of members of epoch 6");
    std::fs::remove_file(&path).unwrap();
    refused("no file", "members.toml");
    // What is not wrong but has no effect is said.
    members(4, &id.to_string());
    let notes = served.reload(&file(&["a", "c"], "")).unwrap();
    assert!(notes.iter().any(|note| note.contains("epoch 4 is older than the epoch 5")), "{notes:?}");
    assert!(lets_in("a") && lets_in("c") && !lets_in("b"));
    members(6, &id.to_string());
    let notes = served.reload(&file(&["a", "c"], "")).unwrap();
    assert!(notes.iter().any(|note| note.contains("epoch 6 with 1 nodes")), "{notes:?}");
}

/// What a purge of this tells.
fn purge(client: &Client, wire: proto::PurgeTenantRequest) -> (u64, u64) {
    let reply = client.purge_tenant(wire).unwrap();
    (reply.namespaces, reply.blocks)
}

fn named(name: &str) -> proto::PurgeTenantRequest {
    proto::PurgeTenantRequest { name: name.to_owned(), ..proto::PurgeTenantRequest::default() }
}

#[test]
fn everything_of_a_tenant_goes_for_good_also_after_it_left_and_nothing_of_another() {
    let mut served = Served::start("leave-purge", &tenants(&["a", "b", "c"]));
    let keys = fixture::keys(5, 0..4);
    for name in ["a", "b", "c"] {
        let client = of(&served, name);
        put(&client, register(&client), &keys, 1).unwrap();
    }
    let c = of(&served, "c");
    let second = c.register(&fixture::identity("second"), &fixture::geometry()).unwrap();
    put(&c, second, &keys[..3], 1).unwrap();
    c.register(&fixture::identity("nothing of it"), &fixture::geometry()).unwrap();
    let notes = served.reload(&tenants(&["a", "b"])).unwrap();
    assert!(
        notes.iter().any(|note| note.starts_with("7 blocks with ") && note.contains("tenant purge")),
        "{notes:?}"
    );
    let a = of(&served, "a");
    let left = a.stats().unwrap().ownerless;
    assert_eq!(
        left.iter().map(|one| (one.unsalted, one.tenants, one.blocks)).collect::<Vec<_>>(),
        [(false, 1, 7)]
    );
    assert_eq!(purge(&a, proto::PurgeTenantRequest { dry_run: true, ..named("c") }), (2, 7));
    assert_eq!(a.stats().unwrap().ownerless.len(), 1, "it was asked what would be");
    assert_eq!(purge(&a, named("c")), (2, 7));
    assert_eq!((purge(&a, named("c")).1, purge(&a, named("e"))), (0, (0, 0)));
    assert!(a.stats().unwrap().ownerless.is_empty());
    // One that is here is purged by its name as well, and goes on.
    assert_eq!(purge(&a, named("b")), (1, 4));
    served.restart_with(&tenants(&["a", "b", "c"]));
    for (name, blocks) in [("a", 4), ("b", 0), ("c", 0)] {
        let client = of(&served, name);
        let found = find(&client, register(&client), &keys, None).unwrap();
        assert_eq!(found.usable.longest.blocks, blocks, "{name}");
    }
    let neither =
        [proto::PurgeTenantRequest::default(), proto::PurgeTenantRequest { unsalted: true, ..named("a") }];
    assert!(neither.into_iter().all(|wire| of(&served, "a").purge_tenant(wire).is_err()));
}

#[test]
fn what_was_stored_without_tokens_is_told_and_a_tenant_can_have_it() {
    let mut served = Served::start("leave-unsalted", "");
    let keys = fixture::keys(5, 0..4);
    let before = served.client(None);
    let namespace = register(&before);
    put(&before, namespace, &keys, 1).unwrap();
    assert_eq!(served.daemon().ownerless(), None);
    served.restart_with(&tenants(&["a", "b"]));
    let told = served.daemon().ownerless().expect("four blocks that no token finds");
    assert!(told.starts_with("4 blocks with ") && told.contains("unsalted = true"), "{told}");
    let a = of(&served, "a");
    assert_ne!(register(&a), namespace);
    let left = a.stats().unwrap().ownerless;
    assert_eq!(left.iter().map(|one| (one.unsalted, one.blocks)).collect::<Vec<_>>(), [(true, 4)]);
    served.restart_with(&(tenants_with(&["a"], "unsalted = true\n") + &tenants(&["b"])));
    assert_eq!(served.daemon().ownerless(), None);
    let (a, b) = (of(&served, "a"), of(&served, "b"));
    assert_eq!(register(&a), namespace, "it has what was there");
    assert_eq!(read(&a, namespace, &keys).unwrap().0.usable_blocks, 4);
    expect_unknown(&b, namespace, &keys);
    // Or it goes.
    served.restart_with(&tenants(&["a", "b"]));
    let unsalted = proto::PurgeTenantRequest { unsalted: true, ..proto::PurgeTenantRequest::default() };
    assert_eq!(purge(&of(&served, "b"), unsalted), (1, 4));
    assert_eq!(served.daemon().ownerless(), None);
}
