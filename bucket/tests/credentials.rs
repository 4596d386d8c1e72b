//! Which credentials a request is signed with.
#![allow(clippy::disallowed_methods, reason = "a real file and a real socket")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvarts_bucket::credentials::KeysFile;
use kvarts_bucket::s3::S3Bucket;
use kvarts_cold::{Bucket, Fault};
use object_store::aws::AmazonS3Builder;
use tokio::runtime::Runtime;

/// How old what was read of a file may be.
const AGAIN: Duration = Duration::from_millis(50);

/// A server that notes the heads of requests and has nothing.
fn listening() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (port, heads) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<String>>>::default());
    let known = Arc::clone(&heads);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (mut stream, mut head) = (stream, [0; 16384]);
            let read = stream.read(&mut head).unwrap();
            known.lock().unwrap().push(String::from_utf8_lossy(&head[..read]).into_owned());
            let _ =
                stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    (port, heads)
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn builder(port: u16) -> AmazonS3Builder {
    let endpoint = format!("http://127.0.0.1:{port}");
    AmazonS3Builder::new().with_endpoint(endpoint).with_region("us-east-1").with_allow_http(true)
}

#[test]
fn keys_that_are_replaced_in_their_file_are_used_without_a_restart() {
    let file = std::env::temp_dir().join(format!("kvarts-credentials-{}", std::process::id()));
    let write = |key: &str, token: &str| {
        let text =
            format!("[p]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token={token}\n");
        std::fs::write(&file, text).unwrap();
    };
    write("FIRST", "one");
    let (port, heads) = listening();
    let keys = KeysFile::open(&file, "p").unwrap().read_again_after(AGAIN);
    let bucket = S3Bucket::new(builder(port).with_credentials(Arc::new(keys)), "b", "").unwrap();
    let runtime = runtime();
    let ask = || {
        heads.lock().unwrap().clear();
        assert_eq!(runtime.block_on(bucket.get("x", 10)), Err(Fault::Missing));
        let head = heads.lock().unwrap().concat();
        let word =
            |from: &str| head.split_once(from).unwrap().1.split(['/', '\r']).next().unwrap().to_owned();
        (word("Credential="), word("x-amz-security-token: "))
    };
    let is = |key: &str, token: &str| (key.to_owned(), token.to_owned());
    assert_eq!(ask(), is("FIRST", "one"));
    write("SECOND", "two");
    std::thread::sleep(AGAIN);
    assert_eq!(ask(), is("SECOND", "two"));
    // Half of a file that is being replaced, and none.
    std::fs::write(&file, "[p]\naws_access_key_id=THI").unwrap();
    std::thread::sleep(AGAIN);
    assert_eq!(ask(), is("SECOND", "two"));
    std::fs::remove_file(&file).unwrap();
    std::thread::sleep(AGAIN);
    assert_eq!(ask(), is("SECOND", "two"));
    write("THIRD", "three");
    std::thread::sleep(AGAIN);
    assert_eq!(ask(), is("THIRD", "three"));
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_source_of_credentials_that_says_no_or_nothing_is_told_from_the_bucket() {
    let (port, heads) = listening();
    let runtime = runtime();
    // An instance's: its service has none.
    let none = builder(port).with_metadata_endpoint(format!("http://127.0.0.1:{port}"));
    let bucket = S3Bucket::new(none, "b", "").unwrap();
    let fault = runtime.block_on(bucket.get("x", 10)).unwrap_err();
    assert!(matches!(&fault, Fault::Denied(why) if why.contains("no credentials")), "{fault:?}");
    assert!(heads.lock().unwrap().iter().all(|head| !head.contains("/b/x")), "the bucket was not asked");
    let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let away = builder(port).with_metadata_endpoint(format!("http://127.0.0.1:{gone}"));
    let bucket = S3Bucket::new(away, "b", "").unwrap();
    let fault = runtime.block_on(bucket.get("x", 10)).unwrap_err();
    assert!(matches!(&fault, Fault::Unreachable(why) if why.contains("no credentials")), "{fault:?}");
}
