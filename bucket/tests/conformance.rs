//! What the tier asks of a bucket, of each kind that there is: a directory, and a real S3 server where there is one.
#![allow(clippy::disallowed_methods, reason = "real files, a real server")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::s3;
use bytes::Bytes;
use kvarts_bucket::directory::Directory;
use kvarts_bucket::s3::S3Bucket;
use kvarts_cold::{Bucket, Condition, Fault, Places, Tag};
use object_store::aws::AmazonS3Builder;
use tokio::runtime::Runtime;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-bucket-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn builder(port: u16) -> AmazonS3Builder {
    AmazonS3Builder::new()
        .with_endpoint(format!("http://127.0.0.1:{port}"))
        .with_region("us-east-1")
        .with_access_key_id("some")
        .with_secret_access_key("secret")
        .with_allow_http(true)
}

fn s3(port: u16) -> S3Bucket {
    S3Bucket::new(builder(port), s3::BUCKET, "below/this/").unwrap()
}

fn body(text: &str) -> Vec<Bytes> {
    // In two pieces, as packs come.
    let (a, b) = text.as_bytes().split_at(text.len() / 2);
    vec![Bytes::copy_from_slice(a), Bytes::copy_from_slice(b)]
}

/// The bytes of a range; too few are the wrong length.
async fn range(bucket: &dyn Bucket, name: &str, range: Range<u64>) -> Result<Vec<u8>, Fault> {
    let (into, memory) = Places::of_own(range.end - range.start)?;
    match bucket.get_range(name, range, &into).await? {
        came if came == into.bytes() && came == into.came() => Ok(memory.to_vec()),
        _ => Err(Fault::Length),
    }
}

async fn conforms(bucket: &dyn Bucket) {
    let name = "kvarts-cold-1/packs/ab/cd";
    assert_eq!(bucket.get(name, 100).await, Err(Fault::Missing));
    assert_eq!(range(bucket, name, 0..1).await, Err(Fault::Missing));
    assert_eq!(bucket.head(name).await, Err(Fault::Missing));
    assert_eq!(bucket.delete(name).await, Ok(()));
    let first = bucket.put(name, body("hello, cold world"), Condition::Absent).await.unwrap();
    let (bytes, tag) = bucket.get(name, 17).await.unwrap();
    assert_eq!((&bytes[..], &tag), (&b"hello, cold world"[..], &first));
    assert_eq!(bucket.get(name, 16).await, Err(Fault::Length));
    assert_eq!(range(bucket, name, 7..11).await.unwrap(), b"cold");
    assert_eq!(range(bucket, name, 10..18).await, Err(Fault::Length));
    let facts = bucket.head(name).await.unwrap();
    assert_eq!((facts.bytes, &facts.tag), (17, &first));
    assert!(facts.modified_ms > 1_700_000_000_000);
    // Conditions.
    assert_eq!(bucket.put(name, body("other"), Condition::Absent).await, Err(Fault::Changed));
    let second = bucket.put(name, body("second"), Condition::Is(first.clone())).await.unwrap();
    assert_ne!(second, first);
    assert_eq!(bucket.put(name, body("third"), Condition::Is(first.clone())).await, Err(Fault::Changed));
    assert_eq!(bucket.get(name, 100).await.unwrap(), (Bytes::from_static(b"second"), second.clone()));
    let absent = bucket.put("kvarts-cold-1/manifests/ef", body("x1"), Condition::Is(first)).await;
    assert!(matches!(absent, Err(Fault::Changed | Fault::Missing)), "{absent:?}");
    bucket.put(name, body("whatever was there"), Condition::Any).await.unwrap();
    assert_eq!(bucket.put(name, body("fourth"), Condition::Is(second)).await, Err(Fault::Changed));
    // Listings, in pages.
    for number in 0..7 {
        let name = format!("kvarts-cold-1/packs/ab/x{number}");
        bucket.put(&name, body("12345"), Condition::Any).await.unwrap();
    }
    bucket.put("kvarts-cold-1/packs/abc/x", body("of another folder"), Condition::Any).await.unwrap();
    let (mut names, mut after) = (Vec::new(), None::<String>);
    loop {
        let page = bucket.list("kvarts-cold-1/packs/ab/", after.as_deref(), 3).await.unwrap();
        after = page.last().map(|last| last.name.clone());
        let is_last = page.len() < 3;
        names.extend(page.into_iter().map(|one| (one.name, one.bytes)));
        if is_last {
            break;
        }
    }
    let mut expected = vec![("kvarts-cold-1/packs/ab/cd".to_owned(), 18)];
    expected.extend((0..7).map(|number| (format!("kvarts-cold-1/packs/ab/x{number}"), 5)));
    assert_eq!(names, expected);
    assert_eq!(bucket.list("kvarts-cold-1/nothing/", None, 10).await, Ok(Vec::new()));
    assert_eq!(bucket.delete(name).await, Ok(()));
    assert_eq!(bucket.get(name, 100).await, Err(Fault::Missing));
    // An object of several MiB, and ranges of it at once.
    let large: Vec<u8> = (0..5 << 20).map(|at: u32| (at ^ (at >> 8)) as u8).collect();
    let whole = || vec![Bytes::from(large.clone())];
    let tag = bucket.put("large", whole(), Condition::Absent).await.unwrap();
    // A server that refuses it before it has read all of it may close the connection: then its answer may be lost.
    for condition in [Condition::Absent, Condition::Is(Tag("\"0\"".to_owned()))] {
        let refused = bucket.put("large", whole(), condition).await;
        assert!(matches!(refused, Err(Fault::Changed | Fault::Unreachable(_))), "{refused:?}");
        // So may be the next one on that connection.
        let facts = match bucket.head("large").await {
            Err(Fault::Unreachable(_)) => bucket.head("large").await,
            facts => facts,
        };
        assert_eq!(facts.map(|facts| facts.tag), Ok(tag.clone()));
    }
    let ranges = (0..16u64).map(|part| range(bucket, "large", part * 300_000..part * 300_000 + 250_001));
    for (part, read) in futures_util::future::join_all(ranges).await.into_iter().enumerate() {
        assert_eq!(read.unwrap(), large[part * 300_000..part * 300_000 + 250_001]);
    }
}

#[test]
fn a_directory_is_a_bucket() {
    let scratch = Scratch::new("directory");
    runtime().block_on(conforms(&Directory::new(&scratch.0)));
}

#[test]
fn a_real_s3_server_is_a_bucket() {
    let Some(server) = s3::Server::start() else { return };
    let bucket = s3(server.port);
    runtime().block_on(conforms(&bucket));
}

#[test]
fn a_server_that_keeps_objects_in_files_is_a_bucket() {
    let Some(server) = s3::Server::start_s3s_fs("bucket") else { return };
    let bucket = s3(server.port);
    runtime().block_on(conforms(&bucket));
}

#[test]
fn of_many_writers_at_once_none_loses_what_another_wrote() {
    let scratch = Scratch::new("writers");
    let bucket = Arc::new(Directory::new(&scratch.0));
    let runtime = runtime();
    runtime.block_on(async {
        let add = |number: u64| {
            let bucket = Arc::clone(&bucket);
            tokio::spawn(async move {
                loop {
                    let (list, condition) = match bucket.get("list", 1 << 20).await {
                        Ok((bytes, tag)) => (String::from_utf8(bytes.to_vec()).unwrap(), Condition::Is(tag)),
                        Err(Fault::Missing) => (String::new(), Condition::Absent),
                        Err(fault) => panic!("{fault}"),
                    };
                    match bucket.put("list", body(&format!("{list}{number},")), condition).await {
                        Ok(_) => return,
                        Err(Fault::Changed) => {}
                        Err(fault) => panic!("{fault}"),
                    }
                }
            })
        };
        for task in (0..24).map(add).collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let (bytes, _) = bucket.get("list", 1 << 20).await.unwrap();
        let mut numbers: Vec<u64> =
            std::str::from_utf8(&bytes).unwrap().split_terminator(',').map(|n| n.parse().unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..24).collect::<Vec<_>>());
    });
    let left: Vec<_> =
        std::fs::read_dir(&scratch.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "the object and the lock, and nothing half-written: {left:?}");
}

#[test]
fn a_name_does_not_lead_out_of_the_directory() {
    let scratch = Scratch::new("names");
    // One folder deeper: beside it nothing else is.
    let bucket = Directory::new(scratch.0.join("bucket"));
    runtime().block_on(async {
        for name in ["../x", "a/../../x", "/etc/passwd", "", "a//b", ".lock", "a/.partial-1-1"] {
            let put = bucket.put(name, body("xy"), Condition::Any).await;
            assert!(matches!(put, Err(Fault::Refused(_))), "{name}: {put:?}");
            assert!(matches!(bucket.get(name, 10).await, Err(Fault::Refused(_))), "{name}");
        }
    });
    assert!(!scratch.0.join("x").exists());
}

/// A server that gives this answer to every request and closes the connection.
fn answers(answer: &'static str) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut request = [0; 16384];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    port
}

/// An answer, and whether a fault is what it means.
type Case = (&'static str, fn(&Fault) -> bool);

#[test]
fn what_goes_wrong_is_told_apart() {
    let cases: [Case; 10] = [
        (
            "HTTP/1.1 503 Slow Down\r\nRetry-After: 7\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            |fault| *fault == Fault::Busy(Some(Duration::from_secs(7))),
        ),
        ("HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", |fault| {
            *fault == Fault::Busy(None)
        }),
        (
            "HTTP/1.1 503 Slow Down\r\nRetry-After: soon\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            |fault| *fault == Fault::Busy(None),
        ),
        ("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", |fault| {
            matches!(fault, Fault::Denied(_))
        }),
        ("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", |fault| {
            *fault == Fault::Missing
        }),
        ("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", |fault| {
            matches!(fault, Fault::Failed(_))
        }),
        ("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", |fault| {
            matches!(fault, Fault::Refused(_))
        }),
        ("HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", |fault| {
            matches!(fault, Fault::Refused(_))
        }),
        (
            "HTTP/1.1 200 OK\r\nLast-Modified: Tue, 24 Nov 2026 10:00:00 GMT\r\nETag: \"x\"\r\nContent-Length: 100\r\n\
             Connection: close\r\n\r\nnot a hundred bytes",
            |fault| matches!(fault, Fault::Unreachable(_) | Fault::Length),
        ),
        ("this is no HTTP at all\r\n\r\n", |fault| matches!(fault, Fault::Unreachable(_))),
    ];
    let runtime = runtime();
    for (answer, is_right) in cases {
        let bucket = s3(answers(answer));
        let fault = runtime.block_on(bucket.get("some/object", 1000)).unwrap_err();
        assert!(is_right(&fault), "{}: {fault:?}", answer.lines().next().unwrap());
        let is_passing = !["400", "403", "404", "501"].iter().any(|status| answer.contains(status));
        assert_eq!(fault.is_passing(), is_passing, "{answer}: {fault:?}");
    }
    // No server listens at this port: its listener is closed at once.
    let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let fault = runtime.block_on(s3(gone).get("some/object", 1000)).unwrap_err();
    assert!(matches!(fault, Fault::Unreachable(_)), "{fault:?}");
}

#[test]
fn a_bucket_that_names_versions_of_objects_keeps_them() {
    let runtime = runtime();
    for (header, keeps) in
        [("", false), ("x-amz-version-id: null\r\n", false), ("x-amz-version-id: 3sL4\r\n", true)]
    {
        let answer = format!(
            "HTTP/1.1 200 OK\r\nLast-Modified: Tue, 24 Nov 2026 10:00:00 GMT\r\nETag: \"x\"\r\n{header}Content-Length: 1\r\n\
             Connection: close\r\n\r\nx"
        );
        let port = answers(answer.leak());
        let (read, written) = (s3(port), s3(port));
        runtime.block_on(read.get("some/object", 1000)).unwrap();
        runtime.block_on(written.put("some/object", body("xy"), Condition::Any)).unwrap();
        assert_eq!((read.keeps_versions(), written.keeps_versions()), (keeps, keeps), "{header}");
    }
}

/// An answer with an error as S3 writes it: it quotes what it was asked.
fn error(status: &str, code: &str) -> &'static str {
    let body = format!(
        "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message><AWSAccessKeyId>AKIDQUOTED</AWSAccessKeyId>\
         <Token-0>quoted-token</Token-0><CanonicalRequest>GET x-amz-security-token:quoted-token</CanonicalRequest></Error>"
    );
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").leak()
}

/// What each request to a server that answers so comes to.
async fn all_of(bucket: &S3Bucket) -> Vec<Fault> {
    vec![
        bucket.get("some/object", 1000).await.unwrap_err(),
        range(bucket, "some/object", 0..10).await.unwrap_err(),
        bucket.put("some/object", body("xy"), Condition::Any).await.unwrap_err(),
        bucket.put("some/object", body("xy"), Condition::Absent).await.unwrap_err(),
        bucket.put("some/object", body("xy"), Condition::Is(Tag("t".to_owned()))).await.unwrap_err(),
        bucket.delete("some/object").await.unwrap_err(),
        bucket.list("some", None, 10).await.unwrap_err(),
        bucket.list("some", Some("some/object"), 10).await.unwrap_err(),
    ]
}

#[test]
fn an_error_is_its_code_and_nothing_else_that_the_server_says() {
    let cases: [Case; 12] = [
        (error("400 Bad Request", "ExpiredToken"), |fault| matches!(fault, Fault::Denied(_))),
        (error("400 Bad Request", "InvalidToken"), |fault| matches!(fault, Fault::Denied(_))),
        (
            error("403 Forbidden", "SignatureDoesNotMatch"),
            |fault| matches!(fault, Fault::Denied(why) if why.contains("SignatureDoesNotMatch")),
        ),
        (error("403 Forbidden", "AccessDenied"), |fault| matches!(fault, Fault::Forbidden(_))),
        (error("403 Forbidden", "RequestTimeTooSkewed"), |fault| matches!(fault, Fault::Denied(_))),
        (
            error("401 Unauthorized", "a word and <another>"),
            |fault| matches!(fault, Fault::Denied(why) if why == "401 Unauthorized"),
        ),
        (error("404 Not Found", "NoSuchBucket"), |fault| *fault == Fault::NoBucket),
        (error("400 Bad Request", "RequestTimeout"), |fault| matches!(fault, Fault::Unreachable(_))),
        (error("400 Bad Request", "EntityTooLarge"), |fault| matches!(fault, Fault::Refused(_))),
        (error("301 Moved Permanently", "PermanentRedirect"), |fault| matches!(fault, Fault::Refused(_))),
        (error("500 Internal Server Error", "InternalError"), |fault| matches!(fault, Fault::Failed(_))),
        (error("503 Slow Down\r\nRetry-After: 3", "SlowDown"), |fault| {
            *fault == Fault::Busy(Some(Duration::from_secs(3)))
        }),
    ];
    let runtime = runtime();
    for (answer, is_right) in cases {
        for (at, fault) in runtime.block_on(all_of(&s3(answers(answer)))).into_iter().enumerate() {
            assert!(is_right(&fault), "request {at}: {fault:?} to {answer}");
            let said = format!("{fault} {fault:?}");
            assert!(!said.contains("QUOTED") && !said.contains("quoted"), "request {at}: {said}");
        }
    }
}

#[test]
fn what_lies_below_any_prefix_is_listed_under_its_name() {
    let Some(server) = s3::Server::start() else { return };
    let runtime = runtime();
    for (at, prefix) in
        ["", "a", "a//b", "~x", "/\u{e9}t\u{e9}/50%/", "a b+c", "..", "x/./y"].iter().enumerate()
    {
        let bucket = S3Bucket::new(builder(server.port), s3::BUCKET, prefix).unwrap();
        runtime.block_on(async {
            let names = [format!("kvarts-cold-1/packs/{at}/ab"), format!("kvarts-cold-1/packs/{at}/cd")];
            for name in &names {
                bucket.put(name, body("some bytes"), Condition::Absent).await.unwrap();
                assert_eq!(&bucket.get(name, 100).await.unwrap().0[..], b"some bytes", "{prefix}");
            }
            let folder = format!("kvarts-cold-1/packs/{at}/");
            let listed = |after: Option<String>| {
                let (bucket, folder) = (&bucket, &folder);
                async move {
                    let found = bucket.list(folder, after.as_deref(), 10).await.unwrap();
                    found.into_iter().map(|one| one.name).collect::<Vec<_>>()
                }
            };
            assert_eq!(listed(None).await, names, "{prefix}");
            assert_eq!(listed(Some(names[0].clone())).await, names[1..], "{prefix}");
        });
    }
}
