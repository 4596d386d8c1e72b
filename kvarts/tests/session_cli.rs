//! `kvarts session list`, of a server whose client has sessions.

use crate::scratch::Scratch;
use crate::served::Server;
use kvarts_client::session::{Session, SessionTerms};
use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::KvStore;
use kvarts_layout::Geometry;
use kvarts_layout::identity::IdentityForm;
use kvarts_layout::key::text_keys;
use serde_json::Value;
use std::time::Duration;

/// A session on the ten blocks that are stored, and a fork of it on seven, for an hour.
pub(crate) fn two_sessions(server: &Server) -> (Session, Session) {
    let options = ConnectOptions::to(format!("unix:{}", server.path("kvarts-data/kvarts.sock").display()));
    let client = Client::connect(&options).unwrap();
    let geometry = Geometry::opaque(4096).unwrap();
    let text = std::fs::read_to_string(server.path("ID.toml")).unwrap();
    let identity = IdentityForm::from_toml(&text).unwrap().of(&geometry).unwrap();
    let group = geometry.groups()[0].group;
    let column = (group, geometry.coordinate(group, 1, 0).unwrap());
    let namespace = client.register(&identity, &geometry).unwrap();
    let keys = text_keys(&(0..160).collect::<Vec<u32>>(), 16);
    let lease = Duration::from_secs(3600);
    let terms = SessionTerms { namespace, columns: vec![column], shared_blocks: 0, lease };
    let (one, told) = Session::open(&client, terms, &keys, None).unwrap();
    assert_eq!(told.held, 10);
    let (fork, _) = one.fork(7, None).unwrap();
    (one, fork)
}

#[test]
fn sessions_are_listed_until_they_end() {
    let server = Server::start(Scratch::new("sessions"), &["--index-memory", "64M"]);
    server.store_pages();
    let list = || server.kvarts(&["session", "list"]);
    assert_eq!(list(), (0, "no sessions exist\n".to_owned(), String::new()));
    let (one, fork) = two_sessions(&server);
    let (code, out, error) = server.kvarts(&["session", "list", "--json"]);
    assert_eq!(code, 0, "{error}");
    let listed: Value = serde_json::from_str(&out).unwrap();
    let of = |id: u64| {
        let all = listed["sessions"].as_array().unwrap();
        assert_eq!(all.len(), 2, "{out}");
        all.iter().find(|one| one["session"] == id).unwrap()
    };
    let (parent, child) = (of(one.id()), of(fork.id()));
    assert_eq!((&parent["blocks"], &parent["leases"], &parent["forks"]), (&10.into(), &1.into(), &1.into()));
    assert_eq!((&parent["parent"], &parent["is_handed_over"]), (&Value::Null, &false.into()));
    assert_eq!((&child["parent"], &child["parent_blocks"]), (&one.id().into(), &7.into()));
    assert_eq!(
        (&child["blocks"], &child["leases"], &child["model"]),
        (&7.into(), &0.into(), &"pages".into())
    );
    assert_eq!(child["tip"], Value::from(one.keys()[6].to_string()));
    let left = child["ends_in_ms"].as_u64().unwrap();
    assert!((3_000_000..=3_600_000).contains(&left), "{left}");
    let text = list().1;
    let standing = format!("7 blocks of {}", one.id());
    assert!(text.starts_with("SESSION ") && text.contains(&standing) && text.contains("pages"), "{text}");
    fork.close().unwrap();
    assert!(!list().1.contains(&standing));
    one.close().unwrap();
    assert_eq!(list().1, "no sessions exist\n");
}

#[test]
fn more_sessions_than_go_into_an_answer_are_all_listed() {
    let server = Server::start(Scratch::new("more-sessions"), &["--index-memory", "64M"]);
    server.store_pages();
    let (one, _fork) = two_sessions(&server);
    let forks: Vec<Session> = (0..1100).map(|_| one.fork(1, None).unwrap().0).collect();
    let (_, out, _) = server.kvarts(&["session", "list", "--json"]);
    let listed: Value = serde_json::from_str(&out).unwrap();
    let mut told: Vec<u64> =
        listed["sessions"].as_array().unwrap().iter().map(|one| one["session"].as_u64().unwrap()).collect();
    assert_eq!(told.len(), forks.len() + 2);
    assert!(told.is_sorted());
    told.dedup();
    assert_eq!(told.len(), forks.len() + 2);
}
