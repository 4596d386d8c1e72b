//! The examples of the libraries do what their pages say. They are built with the tests of their packages.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

struct Server {
    process: Child,
    directory: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn scratch(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("kvarts-example-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

fn example(name: &str, argument: &str) -> Vec<String> {
    let folder = Path::new(env!("CARGO_BIN_EXE_kvarts")).parent().unwrap().join("examples");
    let program = folder.join(name);
    assert!(program.exists(), "{} is not built: `cargo build --workspace --examples`", program.display());
    let output = Command::new(program).arg(argument).output().unwrap();
    assert!(output.status.success(), "{name}: {output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_store_inside_a_process_gives_back_what_was_put() {
    let directory = scratch("embed");
    let said = example("embed", directory.to_str().unwrap());
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(said[0].matches("Stored").count() == 8, "{said:?}");
    assert_eq!(said[1..], ["match: 8 of 12 blocks", "read: 32 layers of 8 blocks, 0 failures"]);
}

#[test]
fn the_example_of_the_page_runs_as_it_stands_there_with_the_dependencies_that_it_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let (path, page, source) =
        (root.join("docs/using.md"), read("docs/using.md"), read("store/examples/first.rs"));
    let shown = |begin: &str, end: &str| {
        let (_, behind) = page.split_once(begin).unwrap_or_else(|| panic!("no {begin:?}"));
        behind.split_once(end).unwrap().0.to_owned()
    };
    let program = shown("<!-- store/examples/first.rs -->\n```rust\n", "```\n<!-- end -->");
    if std::env::var_os("KVARTS_BLESS").is_some() && program != source {
        std::fs::write(path, page.replace(&program, &source)).unwrap();
        return;
    }
    assert!(program == source, "docs/using.md shows another example: KVARTS_BLESS=1 writes it anew");
    // What it uses is what the page says to depend on, each a crate of this name in this folder.
    let manifest = shown("<!-- dependencies of store/examples/first.rs -->\n```toml\n", "```");
    let (_, dependencies) = manifest.split_once("[dependencies]\n").unwrap();
    let named: Vec<&str> = dependencies.lines().filter_map(|line| line.split(" = ").next()).collect();
    let used = source.lines().filter_map(|line| line.strip_prefix("use kvarts_")?.split("::").next());
    assert_eq!(named, used.map(|name| format!("kvarts-{name}")).collect::<Vec<_>>());
    for name in named {
        let folder = name.trim_start_matches("kvarts-");
        assert!(read(&format!("{folder}/Cargo.toml")).contains(&format!("name = \"{name}\"\n")), "{name}");
    }
    assert!(page.contains("Rust 1.95 or newer") && read("Cargo.toml").contains("rust-version = \"1.95\""));

    let directory = scratch("first");
    let said = example("first", directory.to_str().unwrap());
    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(said[..2], ["put: [Stored, Stored]", "match: 2 of 4 blocks"], "{said:?}");
    let layers = (0..32).map(|layer| format!("layer {layer}: 2 blocks, 524288 bytes"));
    assert_eq!(said[2..34], layers.collect::<Vec<_>>());
    assert_eq!(said[34..], ["read: 2 blocks"]);
}

#[test]
fn clients_of_a_server_read_what_they_put_as_blocks_and_as_pages() {
    let directory = scratch("served");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    command.current_dir(&directory).args([
        "serve",
        "--listen-grpc",
        "127.0.0.1:0",
        "--listen-metrics",
        "none",
    ]);
    command.args(["--budget", "128 MiB", "--segment", "16 MiB", "--memory", "64 MiB"]);
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    let server = Server { process, directory };
    let address = ready.split_whitespace().find_map(|word| word.strip_prefix("grpc=")).unwrap();
    let endpoint = format!("http://{address}");
    let said = example("client", &endpoint);
    assert_eq!(said[1].matches("Stored").count(), 4, "{said:?}");
    assert_eq!(said[2], "read: 4 blocks, 0 failures");
    assert_eq!(
        example("pages", &endpoint),
        [
            "put: 16 pages written",
            "exists: the first 16 pages are stored",
            "get: the first 16 pages are complete and verified"
        ]
    );
    drop(server);
}
