//! What administrators tell a running server, with the built program: scrub, checkpoint, budget, reload, drain; what is pinned; and
//! what the log of a server says of normal clients, which is nothing.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::scratch::Scratch;
use crate::served::{Server, http};
use serde_json::Value;

const TOKENS: [&str; 2] = ["--tokens", "tokens"];

fn json((code, out, err): (i32, String, String)) -> (i32, Value) {
    (code, serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out:?} {err:?}")))
}

#[test]
fn a_server_scrubs_writes_a_checkpoint_changes_its_budget_and_stops_when_it_is_told_to() {
    let server = Server::start(Scratch::new("admin"), &["--index-memory", "64M"]);
    server.store_pages();
    let (code, report) = json(server.kvarts(&["scrub", "--json"]));
    assert_eq!((code, &report["blocks_checked"], &report["blocks_damaged"]), (0, &10.into(), &0.into()));
    assert!(server.kvarts(&["scrub"]).1.contains("no block is damaged"));
    assert!(server.kvarts(&["checkpoint"]).1.starts_with("a checkpoint was written"));

    let (_, shown) = json(server.kvarts(&["budget", "--json"]));
    assert_eq!(shown["budget_bytes"], 64 << 20);
    let (code, grown) = json(server.kvarts(&["budget", "96M", "--json"]));
    assert_eq!(
        (code, &grown["budget_bytes"], &grown["before_bytes"]),
        (0, &(96 << 20).into(), &(64 << 20).into())
    );
    assert!(server.metrics().contains("kvarts_disk_budget_bytes 100663296"));
    // More than any disk has, as at a start.
    let (code, _, error) = server.kvarts(&["budget", "1000T"]);
    assert!(code == 2 && error.contains("the budget of 1000 TiB does not fit on the disk"), "{error}");
    assert!(error.contains("lower the budget to"), "{error}");
    // Less than what is allocated: blocks would go, so it is asked.
    let allocated = shown["allocated_bytes"].as_u64().unwrap();
    let less = format!("{}", allocated - 4096);
    let (code, _, error) = server.kvarts(&["budget", &less]);
    assert!(code == 2 && error.contains("evicts blocks until") && error.contains("--yes"), "{error}");
    let (_, shown) = json(server.kvarts(&["budget", "--json"]));
    assert_eq!(shown["budget_bytes"], 96 << 20, "nothing was done");

    // A part of the disk, whose size the server knows: it may be less, so it is asked.
    let (code, _, error) = server.kvarts(&["budget", "1%"]);
    assert!(code == 2 && error.contains("1% of the server's disks") && error.contains("--yes"), "{error}");
    let (code, part) = json(server.kvarts(&["budget", "1%", "--yes", "--json"]));
    let disk = rustix::fs::statvfs(server.path("kvarts-data").as_path()).unwrap();
    assert_eq!((code, &part["budget_bytes"]), (0, &(disk.f_blocks * disk.f_frsize / 100).into()), "{part}");
    for wrong in ["0%", "101%", "x%"] {
        let (code, _, error) = server.kvarts(&["budget", wrong, "--yes"]);
        assert!(code == 2 && error.contains("write 1% to 100%"), "{error}");
    }
    // What the configuration says is told at a reload: it is not taken before the next start.
    let (_, out, _) = server.kvarts(&["reload"]);
    assert!(
        out.contains("store.budget is 64 MiB in the configuration, but the server uses")
            && out.contains("kvarts budget \"64 MiB\""),
        "{out}"
    );
    assert_eq!(server.kvarts(&["budget", "96M", "--yes"]).0, 0);

    // A server without a configuration file reads its environment and flags again, which changes nothing.
    let (code, reloaded) = json(server.kvarts(&["reload", "--json"]));
    assert_eq!((code, &reloaded["reloaded"]), (0, &true.into()));
    let (code, _, error) = server.kvarts(&["drain"]);
    assert!(code == 2 && error.contains("--yes"), "{error}");
    assert_eq!(server.client(&["match"], &TOKENS).0, 0, "it serves on");
    let mut server = server;
    assert_eq!(server.kvarts(&["drain", "--yes"]).0, 0);
    assert!(server.ends().success(), "it stops by itself");
}

#[test]
fn what_is_pinned_is_listed_until_it_ends() {
    let server = Server::start(Scratch::new("pins"), &["--index-memory", "64M"]);
    server.store_pages();
    assert_eq!(server.kvarts(&["pin", "--list"]).1, "no pins exist\n");
    let (code, pin) = json(server.client(&["pin", "--hold", "2h", "--json"], &TOKENS));
    assert_eq!(code, 0);
    let (_, listed) = json(server.kvarts(&["pin", "--list", "--json"]));
    let one = &listed["pins"][0];
    assert_eq!((&one["pin"], &one["blocks"], &one["model"]), (&pin["pin"], &10.into(), &"pages".into()));
    assert_eq!((&one["taken_by"], &one["path"]), (&"pin".into(), &"grpc".into()));
    let left = one["ends_in_ms"].as_u64().unwrap();
    assert!((7_000_000..=7_200_000).contains(&left), "{left}");
    let name = pin["pin"].as_u64().unwrap().to_string();
    let text = server.kvarts(&["pin", "--list", "--all-tenants"]).1;
    assert!(text.starts_with("PIN ") && text.contains(&name) && text.contains("1 h 5"), "{text}");
    assert_eq!(server.kvarts(&["pin", "--release", &name]).0, 0);
    assert_eq!(server.kvarts(&["pin", "--list"]).1, "no pins exist\n");
    // More than a server grants is told, in the answer and by the exit code.
    let (code, out, _) = server.client(&["pin", "--hold", "48h"], &TOKENS);
    assert_eq!(code, 1, "{out}");
    assert!(out.starts_with("10 of 10 blocks are pinned for 24 h 0 min;"), "{out}");
    assert!(out.contains("48 h 0 min were requested, but a pin lasts at most a day"), "{out}");
    let (code, pin) = json(server.client(&["pin", "--hold", "2d", "--json"], &TOKENS));
    assert_eq!((code, &pin["hold_ms"], &pin["held_blocks"]), (1, &86_400_000.into(), &10.into()));
    let (code, pin) = json(server.client(&["pin", "--hold", "24h", "--json"], &TOKENS));
    assert_eq!((code, &pin["hold_ms"]), (0, &86_400_000.into()));
}

#[test]
fn a_server_compacts_when_it_is_told_to_and_a_directory_is_not_taken_for_it() {
    let server = Server::start(
        Scratch::new("compact"),
        &["--index-memory", "64M", "--budget", "64M", "--segment", "1M"],
    );
    server.store_pages();
    // Forty prompts, of which thirty-nine go again: their segments are mostly dead.
    let keys = |prompt: u32| format!("{}", prompt * 1000);
    for prompt in 1..40 {
        let tokens = (0..160).map(|token| format!("{} ", prompt * 1000 + token)).collect::<String>();
        std::fs::write(server.path(&keys(prompt)), tokens).unwrap();
        let put = ["--tokens", &keys(prompt)].map(str::to_owned);
        assert_eq!(server.client(&["put", "blocks"], &put.each_ref().map(String::as_str)).0, 0);
    }
    for prompt in 2..40 {
        let delete = ["--tokens", &keys(prompt)].map(str::to_owned);
        assert_eq!(server.client(&["delete"], &delete.each_ref().map(String::as_str)).0, 0);
    }
    let (code, report) = json(server.kvarts(&["compact", "--json"]));
    let done =
        ["segments_emptied", "blocks_moved", "bytes_written"].map(|name| report[name].as_u64().unwrap());
    assert!(code == 0 && done.iter().all(|count| *count > 0), "{report}");
    assert_eq!(report["blocks_damaged"], 0);
    let (code, out, _) = server.client(&["match"], &TOKENS);
    assert!(code == 0 && out.starts_with("10 of 10 blocks"), "{out}");
    let (code, out, _) = server.kvarts(&["compact"]);
    assert!(
        code == 0 && (out == "no segment needed compaction\n" || out.contains(" segments emptied, ")),
        "{out}"
    );
    let (code, _, error) = server.kvarts(&["compact", "kvarts-data"]);
    assert!(
        code == 2
            && error.contains("in use by another process")
            && error.contains("`kvarts compact` without a"),
        "{error}"
    );
    let (code, _, error) = server.kvarts(&["compact", "kvarts-data", "--server", "127.0.0.1:1"]);
    assert!(code == 2 && error.contains("DIR and the options for a server cannot be combined"), "{error}");
    assert_eq!(server.kvarts(&["compact", "--dry-run"]).0, 2, "of a running server there is no dry run");
}

#[test]
fn a_miss_says_whether_blocks_were_evicted_deleted_or_never_stored_and_metrics_count_it() {
    let server =
        Server::start(Scratch::new("why"), &["--index-memory", "64M", "--budget", "64M", "--segment", "4M"]);
    server.store_pages();
    let (code, out, _) = server.client(&["match"], &["--tokens", "more"]);
    let told = "10 of 20 blocks (160 tokens) can be restored\n  10 never stored, according to this server's records\n";
    assert_eq!((code, out.as_str()), (1, told));
    let (_, listed) = json(server.kvarts(&["ls", "--json"]));
    assert_eq!(
        (&listed["models"][0]["live_blocks"], &listed["models"][0]["model"]),
        (&10.into(), &"pages".into())
    );
    assert!(server.kvarts(&["ls"]).1.contains(": 10 blocks, "), "{}", server.kvarts(&["ls"]).1);
    // An identity of which nothing is stored is not registered by a match, and counted all the same.
    let typo = std::fs::read_to_string(server.path("ID.toml"))
        .unwrap()
        .replace("revision = \"1\"", "revision = \"2\"");
    std::fs::write(server.path("TYPO.toml"), typo).unwrap();
    let asked = ["match", "--identity", "TYPO.toml", "--page-bytes", "4096", "--tokens", "more"];
    let (code, out, _) = server.kvarts(&asked);
    assert!(code == 1 && out.contains("this server has no blocks of this identity"), "{out}");
    let named =
        "pages 1, whose identity differs from the request: revision is \"1\" in the store but \"2\" in";
    assert!(out.contains(named), "{out}");
    let long_hexadecimal = |word: &str| word.len() >= 16 && word.chars().all(|one| one.is_ascii_hexdigit());
    assert!(!out.split_whitespace().any(long_hexadecimal), "a model is called by its name: {out}");
    // Also once an engine with that typo has registered it.
    let get = ["get", "--identity", "TYPO.toml", "--page-bytes", "4096", "--tokens", "more", "--to", "none"];
    assert_eq!(server.kvarts(&get).0, 1, "a miss");
    let (code, out, _) = server.kvarts(&asked);
    assert!(code == 1 && out.contains("never stored") && out.contains(named), "{out}");
    // The last block is deleted.
    let last = (0..160).map(|token| format!("{token} ")).collect::<String>();
    std::fs::write(server.path("all"), last).unwrap();
    let keys = kvarts_layout::key::text_keys(&(0..160).collect::<Vec<u32>>(), 16);
    std::fs::write(server.path("last"), format!("{}\n", keys[9])).unwrap();
    assert_eq!(server.client(&["delete"], &["--keys", "last"]).0, 0);
    let (_, report) = json(server.client(&["match", "--json"], &["--tokens", "more"]));
    let missing = &report["missing"];
    assert_eq!((&missing["deleted"], &missing["never_stored"]), (&1.into(), &10.into()), "{report}");
    // Other prompts until the first ones had to go.
    std::fs::write(server.path("large"), vec![5; 1000 * 4096]).unwrap();
    for prompt in 1..30 {
        let tokens = (0..16_000).map(|token| format!("{} ", prompt * 100_000 + token)).collect::<String>();
        std::fs::write(server.path("prompt"), tokens).unwrap();
        let (code, out, error) = server.client(&["put", "large"], &["--tokens", "prompt"]);
        assert_eq!(code, 0, "{out}{error}");
    }
    let (_, report) = json(server.client(&["match", "--json"], &["--tokens", "all"]));
    let missing = &report["missing"];
    assert!(missing["evicted"].as_u64().unwrap() > 0, "{report}");
    let (_, out, _) = server.client(&["match"], &["--tokens", "all"]);
    assert!(out.contains(" evicted: the space was needed for other blocks\n"), "{out}");
    let metrics = server.metrics();
    let count = |labels: &str| {
        let name = format!("kvarts_lookup_blocks_total{{tenant=\"default\",{labels}}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap_or_else(|| panic!("{name} is not in {metrics}")).parse::<u64>().unwrap()
    };
    assert_eq!(count("model=\"unregistered\",found=\"unregistered\""), 20);
    // Of two matches, and of the get between them, which asked why it found nothing.
    assert_eq!(count("model=\"pages\",found=\"never_stored\""), 60);
    assert_eq!(count("model=\"pages\",found=\"evicted\""), 2 * missing["evicted"].as_u64().unwrap());
}

/// Two tenants: what each may see and do.
#[test]
fn a_token_that_is_added_works_after_a_reload_and_sees_its_own_pins_and_reads_alone() {
    let hash = |token: &str| kvarts_server::state::auth::TokenHash::of(token).to_string();
    let tenant = |name: &str, rights: &str| {
        let hash = hash(&format!("kvarts_{name}"));
        format!(
            "[[tenants]]\nname = '{name}'\n[[tokens]]\ntenant = '{name}'\nrights = [{rights}]\nhash = '{hash}'\n"
        )
    };
    let scratch = Scratch::new("reload");
    let red = tenant("red", "'read', 'write', 'pin', 'admin'");
    std::fs::write(scratch.0.join("server.toml"), &red).unwrap();
    for name in ["red", "blue"] {
        std::fs::write(scratch.0.join(name), format!("kvarts_{name}\n")).unwrap();
    }
    let server = Server::start(scratch, &["--index-memory", "64M", "--config", "server.toml"]);
    let (as_red, as_blue) = (["--token-file", "red"], ["--token-file", "blue"]);
    server.store_pages_with("pages", &as_red);
    assert_eq!(server.client(&["pin"], &[&TOKENS[..], &as_red].concat()).0, 0);
    let refused = server.client(&["match"], &[&TOKENS[..], &as_blue].concat());
    assert!(refused.0 == 2 && refused.2.contains("token"), "{refused:?}");
    // A configuration that cannot be used changes nothing, and the caller hears why.
    std::fs::write(server.path("server.toml"), format!("{red}nonsense = 1\n")).unwrap();
    let (code, _, error) = server.kvarts(&[&["reload"][..], &as_red].concat());
    assert!(code == 2 && error.contains("nothing was changed") && error.contains("nonsense"), "{error}");
    std::fs::write(server.path("server.toml"), red + &tenant("blue", "'read', 'write'")).unwrap();
    let (code, out, error) = server.kvarts(&[&["reload"][..], &as_red].concat());
    assert!(code == 0 && out.contains("are reloaded"), "{out}{error}");
    let found = server.client(&["match"], &[&TOKENS[..], &as_blue].concat());
    assert!(found.0 == 1 && found.1.starts_with("0 of 10"), "{found:?}");

    assert_eq!(server.kvarts(&[&["pin", "--list"][..], &as_blue].concat()).1, "no pins exist\n");
    let (code, _, error) = server.kvarts(&["drain"]);
    assert!(code == 2 && error.contains("token") && !error.contains("--yes"), "{error}");
    let all = server.kvarts(&[&["pin", "--list", "--all-tenants"][..], &as_blue].concat());
    assert!(all.0 == 2 && all.2.contains("right `admin`"), "{all:?}");
    assert!(server.kvarts(&[&["pin", "--list"][..], &as_red].concat()).1.contains("red"));
    // A drain refuses a token that may not do it before it asks for a confirmation.
    for command in ["scrub", "checkpoint", "budget", "reload", "drain"] {
        let (code, _, error) = server.kvarts(&[&[command][..], &as_blue].concat());
        assert!(code == 2 && error.contains("right `admin`"), "{command}: {error}");
    }
    // What names keys is told to an administrator alone; what does not, to everyone.
    let get = |path: &str, token: Option<&str>| {
        let header = token.map(|token| format!("\r\nauthorization: Bearer {token}")).unwrap_or_default();
        http(server.metrics_address(), (&format!("GET {path}"), &header))
    };
    for path in ["/prefixes", "/reads", "/prefixes?namespace=00"] {
        for token in [None, Some("kvarts_blue"), Some("kvarts_nobody")] {
            let answer = get(path, token);
            assert!(answer.starts_with("HTTP/1.1 401 "), "{path} {token:?}: {answer}");
            assert!(!answer.contains("pages"), "{answer}");
        }
        assert!(get(path, Some("kvarts_red")).starts_with("HTTP/1.1 200 "), "{path}");
    }
    assert!(get("/prefixes", Some("kvarts_red")).contains("\"model\":\"pages\""));
    for path in ["/history", "/segments"] {
        let answer = get(path, None);
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("application/json"), "{answer}");
        assert!(!answer.contains("pages") && !answer.contains("red"), "{answer}");
    }
    let log = server.log();
    assert!(
        log.contains("a reload was requested") && log.contains("the configuration was not reloaded"),
        "{log}"
    );
    assert!(!log.contains("kvarts_red") && !log.contains("kvarts_nobody"), "a token stands in the log");
}

#[test]
fn what_was_stored_before_there_were_tokens_is_told_and_given_away_or_deleted() {
    let scratch = Scratch::new("unsalted");
    std::fs::write(scratch.0.join("red"), "kvarts_red\n").unwrap();
    let tenant = |more: &str| {
        let hash = kvarts_server::state::auth::TokenHash::of("kvarts_red");
        format!(
            "[[tenants]]\nname = 'red'\n{more}[[tokens]]\ntenant = 'red'\nrights = ['read', 'admin']\nhash = '{hash}'\n"
        )
    };
    let mut server = Server::start(scratch, &["--index-memory", "64M"]);
    server.store_pages();
    let with_tokens = ["--index-memory", "64M", "--config", "server.toml"];
    let as_red = ["--token-file", "red"];
    let found = |server: &Server| server.client(&["match"], &[&TOKENS[..], &as_red].concat()).1;
    std::fs::write(server.path("server.toml"), tenant("")).unwrap();
    server.start_again(&with_tokens);
    let log = server.log();
    let warned = log.lines().find(|line| line.contains(" WARN ") && line.contains("10 blocks with "));
    assert!(warned.is_some_and(|line| line.contains("unsalted = true")), "{log}");
    assert!(found(&server).starts_with("0 of 10"));
    let (code, stat, _) = server.kvarts(&[&["stat"][..], &as_red].concat());
    assert!(code == 0 && stat.contains("10 blocks") && stat.contains("unsalted"), "{stat}");
    std::fs::write(server.path("server.toml"), tenant("unsalted = true\n")).unwrap();
    server.start_again(&with_tokens);
    assert_eq!(loud(&server.log()), Vec::<String>::new());
    assert!(found(&server).starts_with("10 of 10"));
    let purge = |more: &[&str]| server.kvarts(&[&["tenant", "purge"], more, &as_red].concat());
    let (code, out, _) = purge(&["read"]);
    assert!(code == 1 && out.contains("no blocks of tenant read"), "{out}");
    let (code, _, error) = purge(&["red"]);
    assert!(code == 2 && error.contains("all 10 blocks") && error.contains("--yes"), "{error}");
    let (code, out, _) = purge(&["red", "--dry-run"]);
    assert!(code == 0 && out.starts_with("10 blocks") && out.ends_with("would be deleted\n"), "{out}");
    let (code, purged) = json(purge(&["red", "--yes", "--json"]));
    assert_eq!((code, &purged["blocks"], &purged["deleted"]), (0, &10.into(), &true.into()));
    assert!(found(&server).starts_with("0 of 10"));
}

#[test]
fn the_log_says_at_the_start_what_is_here_and_nothing_of_normal_clients() {
    let server = Server::start(Scratch::new("log"), &["--index-memory", "64M"]);
    server.store_pages();
    for _ in 0..5 {
        assert_eq!(server.client(&["match"], &TOKENS).0, 0);
        assert_eq!(server.client(&["get", "--force", "--to", "back"], &TOKENS).0, 0);
        assert_eq!(server.client(&["get", "--force", "--to", "back"], &["--tokens", "more"]).0, 1, "a miss");
        assert_eq!(server.kvarts(&["stat"]).0, 0);
        assert_eq!(server.kvarts(&["ls"]).0, 0);
        assert_eq!(server.client(&["put", "blocks"], &TOKENS).0, 0);
    }
    // Clients that are killed in the middle are normal, too.
    for _ in 0..3 {
        server.killed(&["watch"]);
    }
    let log = server.log();
    let opened: Vec<&str> = log.lines().filter(|line| line.contains("opened in")).collect();
    let [opened] = &opened[..] else { panic!("{log}") };
    for part in [concat!("kvarts ", env!("CARGO_PKG_VERSION"), ", store "), ": 0 blocks, ", "budget 64 MiB"] {
        assert!(opened.contains(part), "{part} is not in {opened}");
    }
    assert_eq!(loud(&log), Vec::<String>::new());
}

/// Warnings and errors of a log, but that a store is where these tests have their temporary files.
fn loud(log: &str) -> Vec<String> {
    let those = log.lines().filter(|line| line.contains(" WARN ") || line.contains("ERROR"));
    those.filter(|line| !line.contains("the store is in memory (tmpfs)")).map(str::to_owned).collect()
}

/// Whether a folder is in memory, by what the machine says of its mounts.
fn is_tmpfs(folder: &Path) -> bool {
    let kind = Command::new("stat").args(["-f", "-c", "%T"]).arg(folder).output().unwrap();
    String::from_utf8(kind.stdout).unwrap().trim() == "tmpfs"
}

#[test]
fn a_store_in_memory_is_a_warning_at_each_start_and_one_on_a_disk_is_none() {
    let mut tried = BTreeSet::new();
    let folders = [Path::new("/dev/shm"), Path::new(env!("CARGO_TARGET_TMPDIR"))];
    for (at, folder) in folders.into_iter().enumerate().filter(|(_, folder)| folder.is_dir()) {
        let scratch = Scratch(folder.join(format!("kvarts-in-memory-{}-{at}", std::process::id())));
        std::fs::create_dir_all(&scratch.0).unwrap();
        let server = Server::start(scratch, &["--index-memory", "64M"]);
        let (log, is_tmpfs) = (server.log(), is_tmpfs(folder));
        let warned = log.lines().find(|line| line.contains("the store is in memory (tmpfs), in "));
        assert_eq!(
            warned.is_some_and(|line| line.contains(" WARN ")),
            is_tmpfs,
            "{}: {log}",
            folder.display()
        );
        assert!(warned.is_none_or(|line| line.contains("kvarts-data: a reboot loses")), "{log}");
        tried.insert(is_tmpfs);
    }
    assert!(!tried.is_empty());
}

#[test]
fn a_refused_call_and_a_full_store_are_one_warning_each() {
    let server =
        Server::start(Scratch::new("loud"), &["--index-memory", "64M", "--segment", "1M", "--budget", "64M"]);
    server.store_pages();
    assert_eq!(server.client(&["pin", "--hold", "1h"], &TOKENS).0, 0);
    // Everything is held, and there is no room for more.
    let blocks = 4000u32;
    let tokens: String = (0..blocks * 16).map(|token| format!("{} ", token + 100_000)).collect();
    std::fs::write(server.path("many"), tokens).unwrap();
    std::fs::write(server.path("bytes"), vec![3; blocks as usize * 4096]).unwrap();
    let held = ["--tokens", "many"];
    assert_eq!(server.client(&["put", "bytes"], &held).0, 0);
    assert_eq!(server.client(&["pin", "--hold", "1h"], &held).0, 0, "a quarter of the budget");
    assert_eq!(server.kvarts(&["budget", "8M", "--yes"]).0, 0);
    let tokens: String = (0..blocks * 16).map(|token| format!("{} ", token + 500_000)).collect();
    std::fs::write(server.path("others"), tokens).unwrap();
    for _ in 0..3 {
        assert_eq!(server.client(&["put", "bytes"], &["--tokens", "others"]).0, 1, "refused");
    }
    let log = server.log();
    let full =
        log.lines().filter(|line| line.contains("puts are refused, reads continue: no room: ")).count();
    assert_eq!(full, 1, "once for the whole episode: {log}");
}
