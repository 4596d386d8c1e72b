//! A server that stands still: it takes connections and welcomes clients, and answers nothing.
#![allow(clippy::disallowed_methods, reason = "a double of a server has a thread and a socket of its own")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path as FilePath;
use std::time::Duration;

use kvarts_contract::api::ContainsRequest;
use kvarts_contract::blocking::block_on;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_wire::local::frame::{Head, Kind, frame};
use kvarts_wire::local::limits::{HEAD_BYTES, MAGIC, VERSION};
use kvarts_wire::proto;

use crate::{Client, ConnectOptions, Via};

/// Welcomes clients of the local path. Nothing else is said, and connections stay.
fn stand_still(path: &FilePath) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let mut here: Vec<UnixStream> = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut magic = [0; MAGIC.len()];
            stream.read_exact(&mut magic).unwrap();
            if magic == *MAGIC {
                let mut head = [0; HEAD_BYTES];
                stream.read_exact(&mut head).unwrap();
                let mut body = vec![0; Head::parse(&head).unwrap().unwrap().length];
                stream.read_exact(&mut body).unwrap();
                let welcome = proto::Welcome { version: VERSION, ..Default::default() };
                stream.write_all(&frame(Kind::Welcome, 0, &welcome)).unwrap();
            }
            here.push(stream);
        }
    });
}

#[test]
fn a_request_without_a_deadline_ends_on_the_local_path_when_the_server_stands_still() {
    let path = std::env::temp_dir().join(format!("kvarts-still-{}.sock", std::process::id()));
    stand_still(&path);
    let options = ConnectOptions {
        via: Via::Local,
        call_timeout: Duration::from_millis(400),
        ..ConnectOptions::to(format!("unix:{}", path.display()))
    };
    let client = Client::connect(&options).unwrap();
    std::fs::remove_file(&path).unwrap();
    let keys = [BlockKey([1; 32])];
    let request = ContainsRequest {
        namespace: NamespaceId([1; 32]),
        group: Group(0),
        coordinate: Coordinate::Replicated,
        keys: &keys,
        lease: None,
    };
    let answer = block_on(client.store().look_up(&request, None)).unwrap();
    assert!(matches!(answer, Err(Error(Reason::DeadlinePassed))), "{answer:?}");
}
