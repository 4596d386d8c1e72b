//! Sessions of real clients: what they hold, what ends them, and that nothing of them is left.

use std::time::Duration;

use crate::serve_tenants::{COLUMN, put, register};
use crate::served::Served;
use kvarts_client::Client;
use kvarts_client::session::{Session, SessionTerms};
use kvarts_contract::api::{BlockOutcome, KvStore};
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_planner::route::Class;
use kvarts_planner::tails::Keep;
use kvarts_server::state::auth::TokenHash;
use kvarts_tests::fixture::{self, BLOCK_TOKENS};
use kvarts_wire::{convert, proto};

const LONG: Duration = Duration::from_secs(60);
/// Of a client that vanishes: short, for a test waits for it.
const SHORT: Duration = Duration::from_millis(300);

/// Two tenants, of which `red` may hold as many bytes as `blocks` blocks have.
fn configuration(blocks: u64) -> String {
    let pin = fixture::shape(COLUMN.0, COLUMN.1).block_bytes() * blocks;
    let token = |tenant: &str, rights: &str, secret: &str| {
        let hash = TokenHash::of(secret);
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = [{rights}]\nhash = '{hash}'\n")
    };
    [
        format!("[[tenants]]\nname = 'red'\npin = '{pin}'\n[[tenants]]\nname = 'blue'\n"),
        token("red", "'read', 'write', 'pin', 'admin'", "kvarts_red"),
        token("blue", "'read', 'write'", "kvarts_blue"),
    ]
    .concat()
}

fn terms(namespace: NamespaceId, lease: Duration) -> SessionTerms {
    SessionTerms { namespace, columns: vec![COLUMN], shared_blocks: 0, lease }
}

/// A model with these blocks stored.
fn stored(client: &Client, keys: &[BlockKey]) -> NamespaceId {
    let namespace = register(client);
    assert_eq!(put(client, namespace, keys, 1).unwrap(), vec![BlockOutcome::Stored; keys.len()]);
    namespace
}

/// Sessions, rests and leases that a server has.
fn count(served: &Served) -> (usize, usize, usize) {
    served.daemon().state().sessions.table().count()
}

/// Whether as many blocks can be held as may be: then nothing else is.
fn nothing_is_held(client: &Client, namespace: NamespaceId, keys: &[BlockKey]) -> bool {
    match client.pin(namespace, COLUMN, keys, LONG) {
        Ok(pinned) => pinned.held as usize == keys.len() && client.unlock(pinned.lease.unwrap()),
        Err(error) => {
            assert!(matches!(error.0, Reason::PinCap { .. }), "{error}");
            false
        }
    }
}

#[test]
fn a_session_holds_its_blocks_and_forks_of_it_count_them_once() {
    let served = Served::start("sessions-hold", &configuration(6));
    let red = served.client(Some("kvarts_red"));
    let keys = fixture::keys(5, 0..8);
    let namespace = stored(&red, &keys);
    let (mut one, told) = Session::open(&red, terms(namespace, LONG), &keys[..2], None).unwrap();
    assert_eq!((told.held, told.is_owner, told.owner), (2, false, None));
    assert_eq!(one.extend(&keys[2..3], None).unwrap().held, 1);
    // The same again counts once, as soon as it is answered.
    assert_eq!(one.hold(0).unwrap().held, 3);
    assert_eq!(count(&served), (1, 0, 1));
    // Three are held; forks hold no more of them.
    let forks: Vec<_> = (0..10).map(|_| one.fork(3, None).unwrap()).collect();
    assert!(forks.iter().all(|(_, told)| told.class == Class::ForkedRollout));
    let (mut last, _) = one.fork(2, None).unwrap();
    last.extend(&keys[4..5], None).unwrap();
    let refused = last.extend(&keys[5..8], None).unwrap_err();
    assert!(matches!(refused.0, Reason::PinCap { .. }), "{refused}");
    assert_eq!(last.keys().len(), 3);
    // What forks stand on outlives the parent.
    assert!(one.close().unwrap());
    assert_eq!(count(&served), (11, 1, 2));
    assert!(!nothing_is_held(&red, namespace, &keys[..6]));
    for (fork, _) in forks {
        assert!(fork.close().unwrap());
    }
    assert!(last.close().unwrap());
    assert_eq!(count(&served), (0, 0, 0));
    assert!(nothing_is_held(&red, namespace, &keys[..6]));
}

#[test]
fn no_session_of_another_tenant_is_seen_or_used() {
    let served = Served::start("sessions-tenants", &configuration(4));
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let keys = fixture::keys(5, 0..3);
    let of_red = stored(&red, &keys);
    let of_blue = stored(&blue, &keys);
    let (one, _) = Session::open(&red, terms(of_red, LONG), &keys, None).unwrap();
    let session = one.id();
    let ended = |error: kvarts_contract::error::Error| assert_eq!(error.0, Reason::LeaseEnded);
    let list = |client: &Client, session| {
        client.sessions(proto::ListSessionsRequest { session, after: 0 }).unwrap().sessions.len()
    };
    for number in [0, session] {
        assert_eq!((list(&red, number), list(&blue, number)), (1, 0));
    }
    let fork = proto::ForkSessionRequest { session, lease_ms: 1000, ..Default::default() };
    ended(blue.fork_session(fork).unwrap_err());
    let extend = proto::ExtendSessionRequest {
        session,
        first_block: 3,
        keys: convert::key_bytes(&fixture::keys(6, 0..1)),
        ..Default::default()
    };
    ended(blue.extend_session(extend).unwrap_err());
    ended(blue.renew_session(proto::RenewSessionRequest { session, lease_ms: 1000 }).unwrap_err());
    ended(blue.hand_over_session(proto::HandOverSessionRequest { session }).unwrap_err());
    assert!(!blue.close_session(session).unwrap());
    // Its namespace neither; and of one's own a session may have any number, another tenant's too.
    let stolen = Session::open(&blue, terms(of_red, LONG), &keys, None).unwrap_err();
    assert_eq!(stolen.0, Reason::UnknownNamespace(of_red));
    let same = proto::OpenSessionRequest {
        namespace: of_blue.as_bytes().to_vec().into(),
        keys: convert::key_bytes(&keys),
        lease_ms: 1000,
        session,
        ..Default::default()
    };
    assert_eq!(blue.open_session(same).unwrap().session, session);
    assert!(blue.close_session(session).unwrap());
    assert!(one.renew().is_ok() && one.close().unwrap());
}

#[test]
fn a_client_that_vanishes_costs_its_leases_time_and_nothing_after() {
    let served = Served::start("sessions-vanish", &configuration(4));
    let red = served.client(Some("kvarts_red"));
    let keys = fixture::keys(5, 0..4);
    let namespace = stored(&red, &keys);
    let gone = served.client(Some("kvarts_red"));
    let (one, _) = Session::open(&gone, terms(namespace, SHORT), &keys[..2], None).unwrap();
    let (mut fork, _) = one.fork(2, None).unwrap();
    fork.extend(&keys[2..4], None).unwrap();
    let id = fork.id();
    drop(gone);
    served.until("the sessions are over", |_| count(&served) == (0, 0, 0));
    assert!(nothing_is_held(&red, namespace, &keys));
    assert_eq!(
        red.renew_session(proto::RenewSessionRequest { session: id, lease_ms: 1000 }).unwrap_err().0,
        Reason::LeaseEnded
    );
    let metrics = served.metrics();
    for told in ["kvarts_sessions 0", "kvarts_sessions_ended_total{how=\"expired\"} 2"] {
        assert!(metrics.contains(told), "{told} is not in\n{metrics}");
    }
}

#[test]
fn a_server_that_was_killed_has_no_sessions_and_holds_nothing_for_them() {
    let mut served = Served::start("sessions-killed", &configuration(4));
    let red = served.client(Some("kvarts_red"));
    let keys = fixture::keys(5, 0..4);
    let namespace = stored(&red, &keys);
    let (one, _) = Session::open(&red, terms(namespace, LONG), &keys, None).unwrap();
    let session = one.id();
    assert!(!nothing_is_held(&red, namespace, &keys));
    served.halt();
    served.begin_with(&configuration(4));
    let red = served.client(Some("kvarts_red"));
    let namespace = register(&red);
    assert_eq!(count(&served), (0, 0, 0));
    assert!(nothing_is_held(&red, namespace, &keys));
    assert!(!red.close_session(session).unwrap());
    let renewed = red.renew_session(proto::RenewSessionRequest { session, lease_ms: 1000 });
    assert_eq!(renewed.unwrap_err().0, Reason::LeaseEnded);
}

#[test]
fn sessions_of_a_tenant_that_was_taken_out_are_over() {
    let served = Served::start("sessions-left", &configuration(4));
    let blue = served.client(Some("kvarts_blue"));
    let keys = fixture::keys(5, 0..2);
    let namespace = stored(&blue, &keys);
    let _one = Session::open(&blue, terms(namespace, LONG), &keys, None).unwrap();
    let without = configuration(4).split("[[tokens]]\ntenant = 'blue'").next().unwrap().to_owned();
    served.reload(&without.replace("[[tenants]]\nname = 'blue'\n", "")).unwrap();
    assert_eq!(count(&served), (0, 0, 0));
}

#[test]
fn what_is_asked_of_a_session_is_checked() {
    let served = Served::start("sessions-checked", &configuration(40));
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let keys = fixture::keys(5, 0..3);
    let namespace = stored(&red, &keys);
    let open = |client: &Client, namespace: NamespaceId, change: &dyn Fn(&mut proto::OpenSessionRequest)| {
        let mut request = proto::OpenSessionRequest {
            namespace: namespace.as_bytes().to_vec().into(),
            keys: convert::key_bytes(&keys),
            lease_ms: 1000,
            ..Default::default()
        };
        change(&mut request);
        client.open_session(request)
    };
    let kind =
        |change: &dyn Fn(&mut proto::OpenSessionRequest)| open(&red, namespace, change).unwrap_err().kind();
    assert_eq!(kind(&|request| request.lease_ms = 0), Kind::Invalid);
    assert_eq!(kind(&|request| request.keys = Default::default()), Kind::Invalid);
    assert_eq!(kind(&|request| request.shared_blocks = 3), Kind::Invalid);
    assert_eq!(kind(&|request| request.columns = vec![proto::Column::default(); 65]), Kind::Invalid);
    // Longer than ten minutes is for whom may pin.
    let of_blue = register(&blue);
    let hour = |request: &mut proto::OpenSessionRequest| request.lease_ms = 3_600_000;
    assert!(matches!(open(&blue, of_blue, &hour).unwrap_err().0, Reason::Denied(_)));
    let session = open(&red, namespace, &hour).unwrap().session;
    let extend = |first_block, keys: &[BlockKey]| {
        let keys = convert::key_bytes(keys);
        red.extend_session(proto::ExtendSessionRequest { session, first_block, keys, ..Default::default() })
    };
    assert_eq!(extend(4, &keys[..1]).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(extend(3, &[]).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(extend(2, &fixture::keys(6, 0..1)).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(extend(2, &keys[2..]).unwrap().blocks, 3);
    assert_eq!(extend(3, &fixture::keys(6, 0..1)).unwrap().blocks, 4);
    let named = |error: kvarts_contract::error::Error, field: &str| {
        assert!(error.to_string().starts_with(field), "{error}");
    };
    named(extend(5, &keys[..1]).unwrap_err(), "first_block: ");
    named(extend(3, &keys[..1]).unwrap_err(), "keys: ");
    let fork = |blocks, key: &[BlockKey]| {
        let (key, lease_ms) = (convert::key_bytes(key), 1000);
        let request = proto::ForkSessionRequest { session, blocks, key, lease_ms, turn: None };
        red.fork_session(request).unwrap_err()
    };
    named(fork(5, &keys[..1]), "blocks: ");
    named(fork(4, &keys[..1]), "key: ");
    named(open(&red, namespace, &|request| request.session = session).unwrap_err(), "session: ");
    // A number is given away once.
    assert_eq!(kind(&|request| request.session = session), Kind::Invalid);
}

#[test]
fn a_turn_has_its_class_and_an_advice_by_the_engines_times() {
    let served = Served::start("sessions-turns", "");
    let client = served.client(None);
    let keys = fixture::keys(5, 0..40);
    let namespace = register(&client);
    let turn =
        |prompt_tokens, engine_blocks| Some(proto::SessionTurn { prompt_tokens, engine_blocks, times: None });
    let block = u64::from(BLOCK_TOKENS);
    let (mut one, told) =
        Session::open(&client, terms(namespace, LONG), &keys[..20], turn(20 * block + 5000, None)).unwrap();
    assert_eq!((told.held, told.class), (0, Class::NewLongPrefix));
    put(&client, namespace, &keys[..20], 1).unwrap();
    assert_eq!(one.hold(0).unwrap().held, 20);
    // All but a block is in the engine; the same after the engine has forgotten it.
    let next = turn(21 * block, None);
    assert_eq!(one.extend(&keys[20..21], next).unwrap().class, Class::Continuation);
    put(&client, namespace, &keys[20..21], 1).unwrap();
    one.hold(20).unwrap();
    let told = one.extend(&keys[21..22], turn(22 * block, Some(0))).unwrap();
    assert_eq!(told.class, Class::ColdResume);
    // The fixture's model has states: an engine that computes slowly keeps them everywhere.
    let sample = |new| proto::prefill_times::Sample { cached: 0, new, ms: new as f64 / 1000.0 };
    let times = proto::PrefillTimes { samples: vec![sample(1), sample(1 << 40)], roofline: None };
    let fast = proto::SessionTurn { prompt_tokens: 1 << 30, engine_blocks: None, times: Some(times) };
    let slow = one.extend(&keys[22..23], turn(1 << 30, None)).unwrap().tail.unwrap();
    let fast = one.extend(&keys[23..24], Some(fast)).unwrap().tail.unwrap();
    assert!(slow.write_ms > 0.0 && slow.keep == Keep::EveryBlock, "{slow:?}");
    assert!(fast.replay_ms < slow.replay_ms || fast.keep != slow.keep || slow.replay_ms == 0.0, "{fast:?}");
}
