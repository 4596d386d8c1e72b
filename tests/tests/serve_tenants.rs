//! Tenants are apart: by result, error, name, lease and charge; and no client comes in without a token.

use std::time::Duration;

use crate::plain;
use crate::served::Served;
use kvarts_client::{Client, Pinned};
use kvarts_contract::api::{
    BlockOutcome, Durability, KvStore, LeaseId, LeaseTerms, MatchReply, MatchRequest, Order, Parent,
    PutRequest, ReadEnd, ReadRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::class::Class;
use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::{BlockKey, NamespaceId, Requirements};
use kvarts_server::state::auth::TokenHash;
use kvarts_tests::fixture::{self, Style};
use kvarts_wire::proto;
use tonic::transport::Endpoint;
use tonic::{Code, Request};

/// Blocks, each as its chunks.
type Blocks = Vec<Vec<Vec<u8>>>;

pub(crate) const COLUMN: (kvarts_layout::Group, kvarts_layout::Coordinate) =
    (fixture::PAGES, kvarts_layout::Coordinate::Heads { start: 0, count: 2, of: 2 });

fn configuration() -> String {
    let token = |tenant: &str, rights: &str, secret: &str, more: &str| {
        let hash = TokenHash::of(secret);
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = [{rights}]\nhash = '{hash}'\n{more}\n")
    };
    [
        "[[tenants]]\nname = 'red'\npin = '32 KiB'\n[[tenants]]\nname = 'blue'\ncalls = 2\n".to_owned(),
        token("red", "'read', 'write', 'pin', 'admin'", "kvarts_red", ""),
        token("blue", "'read', 'write'", "kvarts_blue", ""),
        token("blue", "'read'", "kvarts_blue_reader", ""),
        token("blue", "'read'", "kvarts_blue_ended", "expires = 1"),
        token("red", "'read'", "kvarts_red_reader", ""),
        token("red", "'write'", "kvarts_red_writer", ""),
        token("red", "'pin'", "kvarts_red_pinner", ""),
        token("red", "'delete'", "kvarts_red_deleter", ""),
        token("red", "'admin'", "kvarts_red_admin", ""),
    ]
    .concat()
}

pub(crate) fn register(client: &Client) -> NamespaceId {
    client.register(&fixture::identity("tenants"), &fixture::geometry()).unwrap()
}

pub(crate) fn put(
    client: &Client,
    namespace: NamespaceId,
    keys: &[BlockKey],
    producer: u64,
) -> Result<Vec<BlockOutcome>, Error> {
    let (group, coordinate) = COLUMN;
    let shape = fixture::shape(group, coordinate);
    let from = fixture::place(&shape, keys.len() as u32, Style::Blocks, 0).unwrap();
    for (at, key) in (0..).zip(keys) {
        fixture::write_block(&from, at, &fixture::content(key, group, coordinate, producer, &shape));
    }
    let request = PutRequest {
        namespace,
        group,
        coordinate,
        parent: Parent::Root,
        first_block: Some(0),
        keys: keys.to_vec(),
        from,
        layout: None,
        durability: Durability::Durable,
        expires_after: None,
        origins: None,
        deadline: None,
    };
    block_on(client.put(request)).unwrap().map(|reply| reply.outcomes)
}

pub(crate) fn read(
    client: &Client,
    namespace: NamespaceId,
    keys: &[BlockKey],
) -> Result<(ReadEnd, Blocks), Error> {
    let (group, coordinate) = COLUMN;
    let shape = fixture::shape(group, coordinate);
    let into = fixture::place(&shape, keys.len() as u32, Style::Blocks, 0).unwrap();
    let request = ReadRequest {
        namespace,
        group,
        coordinate,
        keys: keys.to_vec(),
        layers: None,
        order: Order::Blocks,
        into: into.clone(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    };
    let end = client.read(request)?.wait_blocking();
    let blocks = (0..keys.len() as u32).map(|block| fixture::read_block(&into, block, &shape)).collect();
    Ok((end, blocks))
}

pub(crate) fn find(
    client: &Client,
    namespace: NamespaceId,
    keys: &[BlockKey],
    hold: Option<Duration>,
) -> Result<MatchReply, Error> {
    let (group, coordinate) = COLUMN;
    let one =
        Requirement { group, coordinates: vec![coordinate], need: Need::All, absence: Absence::Required };
    let requirements = Requirements::new(fixture::BLOCK_TOKENS, vec![one]).unwrap();
    let lease = hold.map(|hold| LeaseTerms { hold, tenant: 0, cap_bytes: u64::MAX });
    let requirements = &requirements;
    client.match_prefix(&MatchRequest {
        namespace,
        keys,
        requirements,
        recompute_tokens_max: 0,
        lease,
        plan: None,
    })
}

#[test]
fn equal_models_and_keys_of_two_tenants_are_two_things() {
    let served = Served::start("tenants-apart", &configuration());
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let (of_red, of_blue) = (register(&red), register(&blue));
    assert_ne!(of_red, of_blue);
    let keys = fixture::keys(5, 0..3);
    assert_eq!(put(&red, of_red, &keys, 1).unwrap(), vec![BlockOutcome::Stored; 3]);
    // Nothing tells blue that red has these blocks: no match, no byte, no deduplication.
    assert_eq!(find(&blue, of_blue, &keys, None).unwrap().usable.longest.blocks, 0);
    assert_eq!(read(&blue, of_blue, &keys).unwrap().0.usable_blocks, 0);
    assert_eq!(put(&blue, of_blue, &keys, 2).unwrap(), vec![BlockOutcome::Stored; 3]);
    let shape = fixture::shape(COLUMN.0, COLUMN.1);
    for (client, namespace, producer) in [(&red, of_red, 1), (&blue, of_blue, 2)] {
        let (end, blocks) = read(client, namespace, &keys).unwrap();
        assert_eq!(end.usable_blocks, 3);
        for (key, found) in keys.iter().zip(&blocks) {
            assert_eq!(found, &fixture::content(key, COLUMN.0, COLUMN.1, producer, &shape));
        }
    }
}

#[test]
fn another_tenants_namespace_is_as_unknown_as_none_at_all() {
    let served = Served::start("tenants-names", &configuration());
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let of_red = register(&red);
    let keys = fixture::keys(5, 0..1);
    put(&red, of_red, &keys, 1).unwrap();
    let nobodys = NamespaceId([7; 32]);
    for namespace in [of_red, nobodys] {
        let error = find(&blue, namespace, &keys, None).unwrap_err();
        assert_eq!(error.0, Reason::UnknownNamespace(namespace));
    }
    assert!(blue.models().unwrap().models.is_empty());
    assert_eq!(red.models().unwrap().models.len(), 1);
}

#[test]
fn a_lease_is_its_tenants_and_counts_against_its_cap() {
    let served = Served::start("tenants-leases", &configuration());
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let of_red = register(&red);
    let keys = fixture::keys(5, 0..4);
    put(&red, of_red, &keys, 1).unwrap();
    let hold = Some(Duration::from_secs(60));
    let each = fixture::shape(COLUMN.0, COLUMN.1).block_bytes();
    let fit = (32 << 10) / each;
    assert!((1..4).contains(&fit), "the cap of the test no longer fits its blocks: {each}");
    let refused = find(&red, of_red, &keys, hold).unwrap_err();
    assert_eq!(refused.0, Reason::PinCap { limit: 32 << 10, wanted: each * 4 });
    let lease = find(&red, of_red, &keys[..1], hold).unwrap().lease.unwrap();
    assert!(!blue.unlock(lease) && !red.unlock(LeaseId(lease.0 ^ 1)) && !red.unlock(LeaseId(1)));
    assert!(red.unlock(lease) && !red.unlock(lease));
    let Pinned { lease: pinned, held, .. } =
        red.pin(of_red, COLUMN, &keys[..1], Duration::from_secs(60)).unwrap();
    assert_eq!(held, 1);
    assert!(red.unlock(pinned.unwrap()));
}

fn tenant_space(served: &Served, name: &str) -> kvarts_store::ledger::PoolSpace {
    let state = served.daemon().state();
    let tenants = state.gate.tenants();
    let tenant = tenants.iter().find(|tenant| tenant.name == name).unwrap();
    state.engine.tenant_space(&tenant.salt).unwrap()
}

#[test]
fn a_tenants_disk_quota_holds_for_all_its_models_together_and_costs_nobody_else_a_block() {
    const DISK: u64 = 512 << 10;
    let file = configuration().replace("pin = '32 KiB'", "disk = '512 KiB'");
    let mut served = Served::start("tenants-quota", &file);
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let of_blue = register(&blue);
    let blues = fixture::keys(6, 0..8);
    put(&blue, of_blue, &blues, 1).unwrap();
    let model = |name| red.register(&fixture::identity(name), &fixture::geometry()).unwrap();
    let models = ["first", "second", "third"].map(model);
    for round in 0..40 {
        let keys = fixture::keys(5, round * 4..round * 4 + 4);
        let stored = put(&red, models[round as usize % 3], &keys, 1).unwrap();
        assert_eq!(stored, vec![BlockOutcome::Stored; 4], "{round}");
        let space = tenant_space(&served, "red");
        assert!(space.live + space.promised <= DISK, "{space:?}");
    }
    let full = tenant_space(&served, "red");
    assert!(full.live > DISK / 2, "{full:?}");
    assert_eq!(find(&red, models[0], &fixture::keys(5, 0..4), None).unwrap().usable.longest.blocks, 0);
    assert_eq!(find(&blue, of_blue, &blues, None).unwrap().usable.longest.blocks, 8);
    // What it has counts from the start, before a client names a model.
    let at = served.daemon().grpc().unwrap();
    served.restart_at(at);
    assert!(tenant_space(&served, "red").live > DISK / 2);
    // Blocks that had gone are here again, until they have gone again: a put waits for that.
    assert_eq!(put(&red, models[0], &fixture::keys(8, 0..1), 1).unwrap(), [BlockOutcome::Stored]);
    let space = tenant_space(&served, "red");
    assert!(space.live > DISK / 2 && space.live + space.promised <= DISK, "{space:?}");
    // What is held cannot go: then puts are refused, with figures of the tenant's own; others put as before.
    let mut refused = None;
    for block in 0..100 {
        let keys = fixture::keys(7, block..block + 1);
        match put(&red, models[1], &keys, 1).unwrap().remove(0) {
            BlockOutcome::Stored => {}
            outcome => {
                refused = Some(outcome);
                break;
            }
        }
        red.pin(models[1], COLUMN, &keys, Duration::from_secs(60)).unwrap();
    }
    let Some(BlockOutcome::Refused(Reason::Quota { limit, wanted })) = refused else { panic!("{refused:?}") };
    assert!(limit == DISK && (DISK..2 * DISK).contains(&wanted), "{limit}, {wanted}");
    assert_eq!(put(&blue, of_blue, &fixture::keys(6, 8..9), 1).unwrap(), [BlockOutcome::Stored]);
}

#[test]
fn without_a_valid_token_or_right_nothing_happens() {
    let served = Served::start("tenants-tokens", &configuration());
    for token in [None, Some("kvarts_green"), Some("kvarts_blue_ended"), Some("")] {
        let client = served.client(token);
        let error = client.register(&fixture::identity("x"), &fixture::geometry()).unwrap_err();
        assert_eq!(error.kind(), Kind::Refused, "{token:?}");
        assert!(matches!(error.0, Reason::Denied(_)), "{error:?}");
        assert!(client.stats().is_err() && client.drain().is_err());
    }
    let reader = served.client(Some("kvarts_blue_reader"));
    let namespace = register(&reader);
    let keys = fixture::keys(5, 0..1);
    let error = put(&reader, namespace, &keys, 1).unwrap_err();
    assert!(matches!(&error.0, Reason::Denied(what) if what.contains("write")), "{error}");
    assert!(reader.stats().is_err(), "statistics are for administrators");
    assert!(reader.set_budget(32 << 20).is_err(), "so is the budget");
    assert!(served.client(Some("kvarts_red")).stats().is_ok());
    let metrics = served.metrics();
    assert!(metrics.contains("kvarts_calls_refused_total{method=\"put\",want=\"right\"} 1"), "{metrics}");
    assert!(!metrics.contains("kvarts_blue_reader"), "a token stands in the metrics");
}

/// The right that each method needs, written down a second time.
fn right(method: &str) -> &'static str {
    match method {
        "Store/Put" | "Store/SetDefaultTtl" | "Store/SetTtl" => "write",
        "Sessions/List" => "read",
        method if method.starts_with("Sessions/") => "write",
        "Store/Pin" => "pin",
        "Store/Delete" => "delete",
        "Admin/Stats" | "Admin/Checkpoint" | "Admin/Compact" | "Admin/Scrub" | "Admin/SetBudget"
        | "Admin/Reload" | "Admin/PurgeTenant" | "Admin/Drain" | "Admin/ColdPush" => "admin",
        _ => "read",
    }
}

#[test]
fn each_method_is_for_those_who_have_its_right_and_for_nobody_else() {
    let served = Served::start("tenants-rights", &configuration());
    let endpoint = Endpoint::from_shared(served.endpoint()).unwrap();
    let channel = served.runtime.block_on(endpoint.connect()).unwrap();
    // A message that no method takes: a call that is refused for that was let in.
    let code = |token: &str, method| {
        let reply = plain::answer(&served, &channel, Some(token), (method, vec![0xff; 9]));
        reply.unwrap_err().code()
    };
    let more = [
        "Admin/Watch",
        "Admin/SetBudget",
        "Admin/Reload",
        "Admin/PurgeTenant",
        "Admin/Drain",
        "Admin/ColdPush",
    ];
    for method in plain::METHODS.into_iter().chain(more) {
        for has in ["read", "write", "pin", "delete", "admin"] {
            let token = match has {
                "read" => "kvarts_red_reader",
                "write" => "kvarts_red_writer",
                "pin" => "kvarts_red_pinner",
                "delete" => "kvarts_red_deleter",
                _ => "kvarts_red_admin",
            };
            let expected = if right(method) == has { Code::InvalidArgument } else { Code::PermissionDenied };
            assert_eq!(code(token, method), expected, "{method} with the right to {has}");
        }
        assert_eq!(code("kvarts_nobody", method), Code::Unauthenticated, "{method}");
        assert_eq!(code("kvarts_blue_ended", method), Code::Unauthenticated, "{method}");
    }
}

#[test]
fn a_tenant_has_as_many_calls_under_way_as_it_may_and_others_have_theirs() {
    let served = Served::start("tenants-calls", &configuration());
    let endpoint = Endpoint::from_shared(served.endpoint()).unwrap();
    let channel = served.runtime.block_on(endpoint.connect()).unwrap();
    let watch = |token: &str| {
        let mut request = Request::new(proto::WatchRequest::default());
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        let mut admin = proto::admin_client::AdminClient::new(channel.clone());
        served.runtime.block_on(async move { admin.watch(request).await })
    };
    let (first, _second) = (watch("kvarts_blue").unwrap(), watch("kvarts_blue_reader").unwrap());
    assert_eq!(watch("kvarts_blue").unwrap_err().code(), Code::Unavailable);
    let _others = [watch("kvarts_red").unwrap(), watch("kvarts_red").unwrap(), watch("kvarts_red").unwrap()];
    drop(first);
    served.until("a turn comes back", |_| watch("kvarts_blue").is_ok());
}

#[test]
fn a_token_that_ends_ends_for_those_who_came_in_with_it_too() {
    #[allow(clippy::disallowed_methods, reason = "tokens end by the wall clock")]
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let hash = TokenHash::of("kvarts_short");
    let short =
        format!("[[tokens]]\ntenant = 'red'\nrights = ['read']\nhash = '{hash}'\nexpires = {}\n", now + 3);
    let served = Served::start("tenants-ends", &(configuration() + &short));
    for client in [served.client(Some("kvarts_short")), served.local(Some("kvarts_short"))] {
        let namespace = match register_if_may(&client) {
            Ok(namespace) => namespace,
            // A slow machine: this one came too late.
            Err(error) => {
                assert!(matches!(error.0, Reason::Denied(_)), "{error:?}");
                continue;
            }
        };
        let keys = fixture::keys(5, 0..1);
        served.until("the token ends", |_| match find(&client, namespace, &keys, None) {
            Ok(_) => false,
            Err(error) => matches!(error.0, Reason::Denied(_)),
        });
    }
    let red = served.client(Some("kvarts_red"));
    assert!(find(&red, register(&red), &fixture::keys(5, 0..1), None).is_ok());
}

#[test]
fn a_token_that_is_taken_away_ends_for_whoever_uses_it_and_new_ones_work_without_a_restart() {
    let served = Served::start("tenants-reload", &configuration());
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let (of_red, of_blue) = (register(&red), register(&blue));
    let keys = fixture::keys(5, 0..2);
    put(&red, of_red, &keys, 1).unwrap();
    let hash = |secret: &str| TokenHash::of(secret).to_string();
    let green = format!(
        "[[tenants]]\nname = 'green'\n[[tokens]]\ntenant = 'green'\nrights = ['read', 'write']\nhash = '{}'\n",
        hash("kvarts_green")
    );
    let other = configuration().replace(&hash("kvarts_blue"), &hash("kvarts_blue_new"));
    // Another order: tenants are who their names say.
    served.reload(&(green + &other)).unwrap();
    let error = find(&blue, of_blue, &keys, None).unwrap_err();
    assert!(matches!(error.0, Reason::Denied(_)), "{error:?}");
    assert_eq!(find(&red, of_red, &keys, None).unwrap().usable.longest.blocks, 2);
    let (blue, green) = (served.client(Some("kvarts_blue_new")), served.client(Some("kvarts_green")));
    assert_eq!(register(&blue), of_blue);
    let of_green = register(&green);
    assert!(of_green != of_blue && of_green != of_red);
    assert_eq!(find(&green, of_green, &keys, None).unwrap().usable.longest.blocks, 0);
    put(&green, of_green, &keys, 3).unwrap();
    assert_eq!(read(&green, of_green, &keys).unwrap().0.usable_blocks, 2);
    let state = served.daemon().state();
    for tenant in state.gate.tenants() {
        assert!(
            state.heavy.own(tenant.number).is_some(),
            "{}: the new one has its own part, too",
            tenant.name
        );
    }
    assert!(served.reload("").is_err(), "a server for everybody is another server");
    assert_eq!(find(&red, of_red, &keys, None).unwrap().usable.longest.blocks, 2);
}

fn register_if_may(client: &Client) -> Result<NamespaceId, Error> {
    client.register(&fixture::identity("tenants"), &fixture::geometry())
}

#[test]
fn an_administrator_changes_the_budget_and_one_that_cannot_be_kept_is_refused() {
    let served = Served::start("tenants-budget", &configuration());
    let red = served.client(Some("kvarts_red"));
    let before = red.stats().unwrap().budget_bytes;
    let reply = red.set_budget(before / 2).unwrap();
    assert_eq!(reply.budget_bytes, before / 2);
    assert_eq!(red.stats().unwrap().budget_bytes, before / 2);
    let error = red.set_budget(1).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
    assert_eq!(red.stats().unwrap().budget_bytes, before / 2);
}

#[test]
fn a_restarted_server_is_told_its_models_again_by_its_clients() {
    let mut served = Served::start("tenants-restart", "");
    let port = served.daemon().grpc().unwrap();
    let client = served.client(None);
    let namespace = register(&client);
    let keys = fixture::keys(5, 0..3);
    put(&client, namespace, &keys, 1).unwrap();
    served.restart_at(port);
    let found = find(&client, namespace, &keys, None);
    assert_eq!(found.unwrap().usable.longest.blocks, 3);
    assert_eq!(read(&client, namespace, &keys).unwrap().0.usable_blocks, 3);
}
