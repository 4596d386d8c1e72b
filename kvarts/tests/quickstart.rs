//! The quick start as it stands on its page: its commands are run one after the other with the built program, beside its server.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const PAGE: &str = include_str!("../../docs/quickstart.md");

/// The commands of each block of a page that shows a console.
fn consoles(page: &str) -> Vec<Vec<&str>> {
    let blocks = page.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.map(|block| block.lines().filter_map(|line| line.strip_prefix("$ ")).collect()).collect()
}

/// A directory where commands are run with the built program first on the path.
struct Terminal {
    path: PathBuf,
    server: Option<Child>,
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl Terminal {
    fn open() -> Self {
        Self::open_as("page")
    }

    fn open_as(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-quickstart-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self { path, server: None }
    }

    fn command(&self, line: &str) -> Command {
        let program = Path::new(env!("CARGO_BIN_EXE_kvarts")).parent().unwrap();
        let mut command = Command::new("sh");
        command
            .args(["-c", line])
            .current_dir(&self.path)
            .env("PATH", format!("{}:{}", program.display(), std::env::var("PATH").unwrap()))
            // Other tests have servers of their own: the client finds this one by its socket.
            .envs([("KVARTS_LISTEN_GRPC", "127.0.0.1:0"), ("KVARTS_LISTEN_METRICS", "none")]);
        command
    }

    fn serve(&mut self, line: &str) {
        let mut server = self
            .command(&format!("exec {line}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut told = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut told).unwrap();
        self.server = Some(server);
        assert!(told.starts_with("serving "), "{told:?}");
    }

    fn run(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        assert!(output.status.success(), "{line}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }
}

#[test]
fn the_quick_start_ends_with_equal_bytes_as_it_stands_on_its_page() {
    let consoles = consoles(PAGE);
    let [server, client] = &consoles[..] else { panic!("{consoles:?}") };
    let mut terminal = Terminal::open();
    terminal.serve(server[0]);
    let said: Vec<String> = client.iter().map(|line| terminal.run(line)).collect();
    assert!(said.iter().any(|one| one == "equal\n"), "{said:?}");
    assert!(said.iter().any(|one| one.starts_with("4 of 4 blocks (64 tokens)")), "{said:?}");
    let listed = "llama-3.1-8b demo, 32 layers, blocks of 16 tokens: 4 blocks, 8 MiB, used ";
    assert!(PAGE.contains(listed) && said.iter().any(|one| one.starts_with(listed)), "{said:?}");

    // The typo that the page tells of: nothing is found, the field is named, and nothing was registered.
    terminal.run("sed 's/\"demo\"/\"demi\"/' ID.toml > TYPO.toml");
    let asked = "--identity TYPO.toml --model llama-3.1-8b --tokens TOKENS";
    let told = terminal.run(&format!("kvarts match {asked}; test $? = 1"));
    assert!(
        told.starts_with("0 of 4 blocks (0 tokens) can be restored: this server has no blocks of"),
        "{told}"
    );
    assert!(told.contains("revision is \"demo\" in the store but \"demi\" in the request"), "{told}");
    let json = terminal.run(&format!("kvarts match {asked} --json; test $? = 1"));
    assert!(json.contains("\\\"demi\\\" in the request") && json.contains("\"namespace\": null"), "{json}");
    let models = terminal.run("kvarts ls");
    assert!(models.contains("demo") && !models.contains("demi"), "a match registers nothing: {models}");
    let missed = terminal.run(&format!("kvarts get --to NONE {asked}; test $? = 1 && test ! -e NONE"));
    assert!(missed.contains("revision is \"demo\" in the store"), "{missed}");
    // A started server tells what is on disk before anything is registered with it.
    drop(terminal.server.take().map(|mut server| (server.kill(), server.wait())));
    terminal.serve(server[0]);
    let models = terminal.run("kvarts ls");
    assert!(
        models.contains("llama-3.1-8b demo, 32 layers, blocks of 16 tokens: 4 blocks, 8 MiB, not used since"),
        "{models}"
    );
    let told = terminal.run(&format!("kvarts match {asked}; test $? = 1"));
    assert!(told.contains("revision is \"demo\" in the store"), "{told}");
    assert!(
        terminal
            .run("kvarts match --identity ID.toml --model llama-3.1-8b --tokens TOKENS")
            .starts_with("4 of 4")
    );
}

#[test]
fn a_template_of_an_identity_says_what_is_to_be_filled_in_and_is_complete_once_it_is() {
    let terminal = Terminal::open_as("template");
    let shown = terminal.run("kvarts identity --model llama-3.1-8b --engine vllm");
    let fill: Vec<&str> = shown.lines().filter(|line| line.contains("# FILL IN")).collect();
    assert_eq!(fill.len(), 3, "{shown}");
    assert!(shown.contains("block_tokens = 16  # vLLM's --block-size"), "{shown}");
    terminal.run("kvarts identity --model llama-3.1-8b --engine vllm --out ID.toml && seq 16 > TOKENS");
    assert!(
        !terminal.command("kvarts identity --model llama-3.1-8b --out ID.toml").status().unwrap().success()
    );
    // Before anything is asked of a server, which is none here, all that is missing is told, with its lines.
    let of = "--model llama-3.1-8b --tokens TOKENS --identity";
    let told = terminal.run(&format!("kvarts match {of} ID.toml --server ./none 2>&1; true"));
    for (field, line) in [("revision", 6), ("arrangement.layout", 19), ("arrangement.version", 20)] {
        assert!(told.contains(&format!("{field} (line {line}: empty")), "{field}: {told}\n{shown}");
    }
    for (name, page) in [("glm-4.5", "SGLang"), ("deepseek-v4-pro", "chosen by you")] {
        let shown = terminal.run(&format!("kvarts identity --model {name} --engine sglang --revision r"));
        assert!(shown.contains(page), "{shown}");
    }
    let pages = terminal.run("kvarts identity --page-bytes 64K");
    assert!(pages.contains("--page-bytes 65536 --identity"), "{pages}");
}
