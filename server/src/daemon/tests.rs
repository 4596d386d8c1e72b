//! What a daemon does at its ends that no client sees.

use super::ready::shared_out;
use super::*;
use crate::config::Settings;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-daemon-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn config(&self, socket: &str) -> Config {
        let text = |text: &str| Some(text.to_owned());
        let settings = Settings {
            directories: Some(self.0.join("store").display().to_string()),
            budget: text("16 MiB"),
            segment: text("256 KiB"),
            memory: text("64 MiB"),
            grpc: text("127.0.0.1:0"),
            metrics: text("none"),
            socket: text(socket),
            ..Settings::default()
        };
        Config::resolve(None, |_| None, &settings).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn serving_that_fails_by_itself_is_told_of_and_the_store_is_closed_all_the_same() {
    let scratch = Scratch::new("fails");
    let mut daemon = Daemon::start(&scratch.config("none")).await.unwrap();
    daemon.serving.abort();
    for _ in 0..2 {
        let why = daemon.drained().await.unwrap_err();
        assert!(why.starts_with("serving failed: "), "{why}");
    }
    daemon.stop().await.unwrap();
    let mut daemon = Daemon::start(&scratch.config("none")).await.unwrap();
    daemon.state.start_drain();
    assert_eq!(daemon.drained().await, Ok(()));
    daemon.stop().await.unwrap();
}

#[tokio::test]
async fn only_a_socket_makes_room_for_the_servers_own() {
    let scratch = Scratch::new("socket");
    let path = scratch.0.join("precious");
    let config = scratch.config(path.to_str().unwrap());
    std::fs::write(&path, b"another's work").unwrap();
    let error = Daemon::start(&config).await.expect_err("it starts");
    assert!(error.contains("listen.socket") && error.contains("not a socket"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"another's work");
    std::fs::remove_file(&path).unwrap();
    // What an earlier server left is one.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let daemon = Daemon::start(&config).await.unwrap();
    daemon.stop().await.unwrap();
    assert!(!path.exists());
}

#[test]
fn segment_files_come_before_connections_and_leave_them_half() {
    // Enough for all.
    assert_eq!(shared_out(65_536, 4_096, 16_384), (16_384, 43_520, 4_096));
    // A store of 256 GiB under a limit of 4,096: its files come first.
    assert_eq!(shared_out(4_096, 1_024, 16_384), (1_024, 1_024, 512));
    // Too few for its files alone.
    assert_eq!(shared_out(4_096, 100_000, 16_384), (1_024, 1_024, 512));
    assert_eq!(shared_out(65_536, 196_608, 16_384), (16_384, 43_520, 4_096));
    assert_eq!(shared_out(1_000, 10, 100), (16, 16, 125));
    // Whatever clients share and connect, segment files have theirs.
    for all in (2_048..200_000).step_by(777) {
        let (connections, files, memories) = shared_out(all, 196_608, 16_384);
        assert!(
            connections + files + memories + DESCRIPTORS_KEPT <= all.max(DESCRIPTORS_KEPT + 32 + all / 8)
        );
    }
}
