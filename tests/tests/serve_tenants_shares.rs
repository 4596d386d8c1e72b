//! What tenants share besides memory: connections, what leases and pins hold, and room for models. Each has its part, whatever
//! others do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::serve_tenants::{COLUMN, find, put, read, register};
use crate::served::Served;
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::{BlockOutcome, KvStore};
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::BlockKey;
use kvarts_server::state::auth::{Gate, Token, TokenHash};
use kvarts_server::state::tenant::TenantLimits;
use kvarts_server::state::{Model, ModelLimits, Rights, Tenant};
use kvarts_tests::fixture;
use kvarts_wire::proto::ListModelsRequest;
use kvarts_wire::proto::models_client::ModelsClient;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

const HOLD: Duration = Duration::from_secs(60);
/// The budget of a test's server.
const BUDGET: u64 = 48 << 20;

fn configuration(more: &str) -> String {
    let token = |tenant: &str, rights: &str, secret: &str| {
        let hash = TokenHash::of(secret);
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = [{rights}]\nhash = '{hash}'\n")
    };
    [
        more.to_owned(),
        "[[tenants]]\nname = 'red'\npin = '1 TiB'\n[[tenants]]\nname = 'blue'\n".to_owned(),
        token("red", "'read', 'write', 'pin', 'admin'", "kvarts_red"),
        token("red", "'read'", "kvarts_red_reader"),
        token("blue", "'read', 'write', 'pin'", "kvarts_blue"),
    ]
    .concat()
}

fn hold(client: &Client, keys: &[BlockKey], how_long: Duration) -> Result<(), Error> {
    client.pin(register(client), COLUMN, keys, how_long).map(drop)
}

#[test]
fn pins_of_all_tenants_hold_half_of_the_budget_and_each_has_its_part_of_that() {
    let served = Served::start("shares-pins", &configuration(""));
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let each = fixture::shape(COLUMN.0, COLUMN.1).block_bytes();
    // Two tenants: an eighth of the budget each, unless the configuration says more.
    let (part, all) = (BUDGET / 8 / each, BUDGET / 2 / each);
    let keys = fixture::keys(5, 0..part + 1);
    for client in [&red, &blue] {
        let stored = put(client, register(client), &keys, 1).unwrap();
        assert!(stored.iter().all(|one| *one == BlockOutcome::Stored), "{stored:?}");
    }
    let refused = hold(&blue, &keys, HOLD).unwrap_err();
    assert_eq!(refused.0, Reason::PinCap { limit: BUDGET / 8, wanted: (part + 1) * each });
    // Each lease counts anew: the one that may have more takes what is common, and no more.
    let mut held = 0;
    while hold(&red, &keys[..16], HOLD).is_ok() {
        held += 16;
        assert!(held <= all, "more than half of the budget is held");
    }
    assert!(held + 16 > all - part && held <= all - part, "{held} of {all}, {part} of them the other's");
    let refused = hold(&red, &keys[..16], HOLD).unwrap_err();
    assert!(refused.to_string().contains("all tenants"), "{refused}");
    hold(&blue, &keys[..part as usize], HOLD).expect("its part is its own");
    // A lower budget counts at once.
    red.set_budget(BUDGET / 2).unwrap();
    let refused = hold(&blue, &keys[..1], HOLD).unwrap_err();
    assert!(matches!(refused.0, Reason::PinCap { limit, .. } if limit == BUDGET / 16), "{refused:?}");
}

#[test]
fn who_may_only_read_holds_blocks_for_a_short_while() {
    let served = Served::start("shares-readers", &configuration(""));
    let (red, reader) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_red_reader")));
    let (namespace, keys) = (register(&red), fixture::keys(5, 0..2));
    assert_eq!(register(&reader), namespace);
    put(&red, namespace, &keys, 1).unwrap();
    let needs_pin = |error: Error| {
        assert!(matches!(&error.0, Reason::Denied(why) if why.contains("right `pin`")), "{error}")
    };
    needs_pin(hold(&reader, &keys, HOLD).unwrap_err());
    needs_pin(find(&reader, namespace, &keys, Some(Duration::from_secs(601))).unwrap_err());
    let lease = find(&reader, namespace, &keys, Some(Duration::from_secs(600))).unwrap().lease.unwrap();
    needs_pin(reader.renew(lease, Duration::from_secs(3600)).unwrap_err());
    reader.renew(lease, HOLD).unwrap();
    red.renew(lease, Duration::from_secs(3600)).unwrap();
    assert!(reader.unlock(lease));
}

/// A connection of its own, on which one call was made with this token.
fn known(served: &Served, token: &str) -> Result<Channel, tonic::Status> {
    let endpoint = Endpoint::from_shared(served.endpoint()).unwrap();
    served.runtime.block_on(async {
        let gone = |error: tonic::transport::Error| tonic::Status::unavailable(error.to_string());
        let channel = endpoint.connect().await.map_err(gone)?;
        let mut request = Request::new(ListModelsRequest::default());
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        ModelsClient::new(channel.clone()).list_models(request).await?;
        Ok(channel)
    })
}

#[test]
fn a_tenant_that_takes_all_connections_shuts_nobody_else_out() {
    const CONNECTIONS: usize = 64;
    let served = Served::start("shares-connections", &configuration("[limits]\nconnections = 64\n"));
    let state = served.daemon().state();
    assert_eq!(state.connections.all(), CONNECTIONS);
    // As many as it can have, and each has a call behind it: none is a stranger's.
    let mut reds = Vec::new();
    for _ in 0..2 * CONNECTIONS {
        reds.extend(known(&served, "kvarts_red_reader").ok());
    }
    let (strangers, _) = state.connections.strangers();
    assert!(reds.len() > CONNECTIONS / 2 && strangers < CONNECTIONS / 4, "{} and {strangers}", reds.len());
    served.until("those that were cut are gone", |_| state.connections.free() >= CONNECTIONS / 4);
    for _ in 0..CONNECTIONS / 4 - 2 {
        reds.push(known(&served, "kvarts_blue").expect("another tenant comes in, to the end of its part"));
    }
    let socket = format!("unix:{}", served.daemon().socket().unwrap().display());
    let token = Some("kvarts_red".to_owned());
    let admin =
        Client::connect(&ConnectOptions { via: Via::Grpc, token, ..ConnectOptions::to(socket) }).unwrap();
    admin.stats().expect("an administrator on the socket");
}

#[test]
fn a_model_is_found_by_the_number_and_by_the_salt_of_its_tenant_together() {
    let served = Served::start("shares-salts", &configuration(""));
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let (of_red, of_blue) = (register(&red), register(&blue));
    let state = served.daemon().state();
    let tenants = state.gate.tenants();
    let as_if = |number: u32, salt: &[u8]| {
        let tenant = Tenant::new("as if", number, Some(salt.to_vec()), TenantLimits::default());
        let token = Token { hash: TokenHash::of("x"), tenant, rights: Rights::ALL, expires: None };
        Gate::Tokens(vec![token]).caller(Some(b"Bearer x"), 0).unwrap()
    };
    let [first, second] = &tenants[..] else { panic!("{tenants:?}") };
    assert!(state.models.get(&as_if(first.number, &first.salt.0), of_red).is_ok());
    for (number, salt) in [(first.number, &second.salt), (second.number, &first.salt)] {
        let caller = as_if(number, &salt.0);
        for namespace in [of_red, of_blue] {
            assert!(state.models.get(&caller, namespace).is_err(), "number {number}");
        }
        assert!(state.models.all(&caller).is_empty());
    }
}

#[test]
fn a_model_that_nothing_uses_makes_room_and_one_in_use_does_not() {
    let served = Served::start("shares-models", &configuration(""));
    let state = served.daemon().state();
    let caller = state.gate.caller(Some(b"Bearer kvarts_red"), 0).unwrap();
    let most = ModelLimits { count: 3, listed: 1 << 20, memory: 1 << 20 };
    // Later than whatever the server itself notes.
    let now = AtomicU64::new(state.clock().unix_millis() + 3_600_000);
    let registered = |revision: &str| -> Result<Arc<Model>, Error> {
        let mut identity = fixture::identity(revision);
        identity.tenant_salt = caller.tenant.salt.clone();
        let at = (100, most, now.fetch_add(1, Ordering::Relaxed));
        state.models.register(&state.engine, &caller, identity, fixture::geometry(), at)
    };
    let names = || -> Vec<String> {
        state.models.all(&caller).iter().map(|model| model.identity.revision.clone()).collect()
    };
    let (first, second) = (registered("first").unwrap(), registered("second").unwrap());
    let (namespace, of_second) = (first.namespace, second.namespace);
    drop((first, second));
    registered("third").unwrap();
    // It is registered again, and used: the second one was not touched for longest.
    registered("first").unwrap().used(now.load(Ordering::Relaxed));
    registered("fourth").unwrap();
    let mut left = names();
    left.sort_unstable();
    assert_eq!(left, ["first", "fourth", "third"]);
    assert!(!state.engine.knows(of_second), "nothing was put: the store forgets it, too");
    assert!(state.models.get(&caller, of_second).is_err());
    // What calls and leases have stays, and where that is all the answer says so.
    let used: Vec<_> = ["first", "third", "fourth"].map(|name| registered(name).unwrap()).into();
    let refused = registered("fifth").unwrap_err();
    assert!(
        matches!(refused.0, Reason::Busy(_))
            && refused.to_string().contains("tenant's limit of models is reached"),
        "{refused}"
    );
    drop(used);
    // One that has blocks is registered again and finds them.
    let red = served.client(Some("kvarts_red"));
    let keys = fixture::keys(5, 0..2);
    let stored = red.register(&fixture::identity("first"), &fixture::geometry()).unwrap();
    assert_eq!(stored, namespace);
    put(&red, namespace, &keys, 1).unwrap();
    served.until("the put has ended", |_| state.calls() == 0);
    for revision in ["sixth", "seventh", "eighth"] {
        registered(revision).unwrap();
    }
    assert!(state.models.get(&caller, namespace).is_err() && state.engine.knows(namespace));
    assert_eq!(read(&red, namespace, &keys).unwrap().0.usable_blocks, 2, "its client registers it again");
}
